"""The specification, printed from the code, so that it cannot drift."""

from __future__ import annotations

from zerobench.checks.catalogue import CHECKS


def spec_lines() -> list[str]:
    """Every check: id, level, kind of claim, requirement, formula, scenarios, mutants."""
    lines = ["# zerobench: the specification", ""]
    for check in CHECKS.values():
        lines.append(f"## {check.id} ({check.level.value}{', ' + check.kind if check.kind else ''})")
        lines.append(f"  requirement  {check.requirement}")
        if check.formula:
            lines.append(f"  formula      {check.formula}")
        lines.append(f"  scenarios    {', '.join(check.scenarios) or 'every run of the case'}")
        lines.append(f"  over         {'all world sizes' if check.over == 'family' else 'each case'}")
        if check.mutants:
            lines.append(f"  mutants      {', '.join(check.mutants)}")
        lines.append("")
    return lines
