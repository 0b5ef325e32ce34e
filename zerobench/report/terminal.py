"""Findings on a terminal or in a log: a table of what was measured, every failure in full, and a sum that hides
nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from zerobench.analytic import total_coefficients
from zerobench.case import Case
from zerobench.checks.memory import formula
from zerobench.claims import Recipe
from zerobench.finding import Finding, Level, Status, Verdict
from zerobench.record import Record
from zerobench.report.text import below, on_line, paint, table

COLOURS = {
    Status.PASS: "green",
    Status.FAIL: "red",
    Status.XPASS: "red",
    Status.ERROR: "red",
    Status.XFAIL: "yellow",
    Status.INVALID: "yellow",
    Status.INCONCLUSIVE: "yellow",
    Status.MISSING: "yellow",
    Status.SKIP: "dim",
}
INDENT = 15  # of what stands under "expected" and "actual"
LOUD = (Status.ERROR, Status.FAIL, Status.XPASS, Status.INVALID, Status.INCONCLUSIVE, Status.MISSING)


def finding_lines(finding: Finding, colour: bool) -> list[str]:
    """One finding in full: what is required, expected, and was seen."""
    word = paint(finding.status.value.upper(), COLOURS[finding.status], colour)
    level = "" if finding.level is Level.MUST else f" ({finding.level.value})"
    lines = [f"{word} {on_line(finding.id)}{level}", f"  requirement  {finding.requirement} (spec {finding.check})"]
    if finding.expected:
        lines.append(f"  expected     {below(finding.expected, INDENT)}")
    lines.append(f"  actual       {below(finding.actual, INDENT)}")
    if finding.claim and finding.paper and finding.claim is not finding.paper:
        lines.append(f"  verdicts     claim {finding.claim.value}, paper {finding.paper.value}")
    lines += [" " * INDENT + below(line, INDENT) for line in finding.detail]
    return lines


def case_table(cases: Sequence[Case], records: Mapping[str, Record], verdict: Verdict) -> list[str]:
    """The rows of `case_rows` as lines."""
    return table([tuple(on_line(cell) for cell in row) for row in case_rows(cases, records, verdict)])


def case_rows(cases: Sequence[Case], records: Mapping[str, Record], verdict: Verdict) -> list[tuple[str, ...]]:
    """A heading, and a row a case: what a rank holds and sends beside what the stage says, and whether its checks hold.
    Columns that would be empty are left out."""
    by_case: dict[str, list[Finding]] = {}
    for finding in verdict.findings:
        by_case.setdefault(finding.case, []).append(finding)
    rows: list[tuple[str, ...]] = [
        ("case", "claims", "model states a rank", "formula", "sent a step", "step", "verdict")
    ]
    for case in cases:
        found = {f.check: f for f in by_case.get(case.id, [])}
        record = records.get(case.run("plain").id)
        claims = record.claims if record else None
        stage = f"stage {int(claims.stage)}" if claims else ""
        states, law = "", ""
        rest = found.get("memory.at_rest")
        if rest and rest.metrics and record and record.model and claims:
            states = f"{dict(rest.metrics)['bytes'] / record.model.psi:.3f} Psi"
            a, b = total_coefficients(claims.recipe or Recipe.of(case.precision), claims.stage)
            law = formula(a, b, case.world_size)
        rows.append(
            (
                case.id,
                stage,
                states,
                law,
                _passes(found.get("traffic.volume")),
                _time(found.get("time.step")),
                _word(found.values()) + _caveats(record),
            )
        )
    return _without_empty(rows)


def _caveats(record: Record | None) -> str:
    """What a verdict on a case is not, in a word each."""
    return "".join(
        f", {word}"
        for word, said in (("provisional", record and record.faked), ("shimmed", record and record.shimmed))
        if said
    )


def _without_empty(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows without the columns in which no row but the heading says anything."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [tuple(row[i] for i in kept) for row in rows]


def _passes(finding: Finding | None) -> str:
    return f"{dict(finding.metrics)['passes']:.2f} Psi" if finding and finding.metrics else ""


def _time(finding: Finding | None) -> str:
    return f"{dict(finding.metrics)['median_s'] * 1e3:.1f} ms" if finding and finding.metrics else ""


def _word(findings: Iterable[Finding]) -> str:
    """The case in a word: the loudest of its statuses."""
    counts = Counter(f.status for f in findings if f.level is not Level.INFO)
    for status in (*LOUD, Status.XFAIL):
        if counts[status]:
            return f"{status.value} ({counts[status]})"
    return "pass" if counts[Status.PASS] else "skip"


def summary_lines(verdict: Verdict, colour: bool) -> list[str]:
    """How many findings of each status, and why what did not apply did not."""
    counts = verdict.counts()
    said = ", ".join(paint(f"{counts[s.value]} {s.value}", COLOURS[s], colour) for s in COLOURS if counts[s.value])
    lines = [f"{len(verdict.findings)} findings: {said or 'none'}"]
    reasons = Counter((f.actual, f.check) for f in verdict.findings if f.status is Status.SKIP)
    grouped: dict[str, Counter[str]] = {}
    for (reason, check), count in reasons.items():
        grouped.setdefault(reason, Counter())[check] += count
    for reason, checks in sorted(grouped.items(), key=lambda item: -sum(item[1].values())):
        listed = ", ".join(f"{check} x {n}" for check, n in sorted(checks.items()))
        lines.append(paint(f"  skipped: {on_line(reason)} ({listed})", "dim", colour))
    return lines


def simulated_lines(cases: Sequence[Case], records: Mapping[str, Record]) -> list[str]:
    """What a reader must know of simulated cases: what they are no measurement of, and what was made up."""
    simulated = [case for case in cases if case.simulated]
    if not simulated:
        return []
    ids = {case.run("plain").id for case in simulated}
    partial = sorted({case.world_size for case in simulated if (r := records.get(case.run("plain").id)) and r.partial})
    which = f"; of n = {', '.join(map(str, partial))} the first and the last rank ran" if partial else ""
    lines = [f"simulated: tensors without memory, collectives without peers{which}", ""]
    faked = Counter(what for id in ids if id in records for what in records[id].faked)
    if faked:
        lines[1:1] = ["provisional: values that decide were made up, and the program may have taken another turn:"]
        lines[2:2] = [f"  {on_line(what)} ({count} cases)" for what, count in sorted(faked.items())]
    return lines


def shimmed_lines(cases: Sequence[Case], records: Mapping[str, Record]) -> list[str]:
    """What a reader must know of implementations that were given a stand-in for something."""
    found = {(c.implementation, what) for c in cases if (r := records.get(c.run("plain").id)) for what in r.shimmed}
    lines = [f"{on_line(name)} is shimmed, no verdict on its library: {on_line(what)}" for name, what in sorted(found)]
    return [*lines, ""] if lines else []


def verdict_lines(verdict: Verdict, cases: Sequence[Case], records: Mapping[str, Record], colour: bool) -> list[str]:
    """The whole report: table, families, failures, sum."""
    lines = [""]
    if any(f.check == "memory.at_rest" for f in verdict.findings) or len(cases) <= 60:
        lines += [*case_table(cases, records, verdict), ""]
    lines += simulated_lines(cases, records)
    lines += shimmed_lines(cases, records)
    for finding in verdict.findings:
        if finding.check == "memory.scaling" and finding.status is Status.PASS:
            lines.append(f"{on_line(finding.case)}: {on_line(finding.actual)}")
    loud = [f for f in verdict.findings if f.status in LOUD]
    for finding in loud:
        lines += ["", *finding_lines(finding, colour)]
    return [*lines, "", *summary_lines(verdict, colour)]
