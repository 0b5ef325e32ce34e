"""The specification, printed from the code, so that it cannot drift."""

from __future__ import annotations

from zerobench.checks.catalogue import CHECKS
from zerobench.mutants.names import MUTANTS
from zerobench.scenarios import SCENARIOS


def spec_lines() -> list[str]:
    """Every check: id, level, kind of claim, requirement, formula, scenarios, features, mutants."""
    lines = ["# zerobench: the specification", ""]
    for check in CHECKS.values():
        needed = sorted({f for s in check.scenarios for f in SCENARIOS[s].features})
        mutants = [m.name for m in MUTANTS.values() if check.id in m.killers]
        lines.append(f"## {check.id} ({check.level.value}{', ' + check.kind if check.kind else ''})")
        lines.append(f"  requirement  {check.requirement}")
        for name, text in (
            ("formula", check.formula),
            ("scenarios", ", ".join(check.scenarios) or "every run of the case"),
            ("also", ", ".join(check.also)),
            ("needs", ", ".join(needed)),
            ("over", "all world sizes" if check.over == "family" else ""),
            ("mutants", ", ".join(mutants)),
        ):
            if text:
                lines.append(f"  {name:<11}  {text}")
        lines.append("")
    return lines
