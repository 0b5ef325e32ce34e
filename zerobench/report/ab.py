"""A comparison on a terminal: a line a cell, and what is loud in full."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.finding import Finding, Verdict
from zerobench.report.terminal import LOUD, finding_lines, summary_lines
from zerobench.report.text import on_line, table


def ab_lines(findings: Sequence[Finding], colour: bool) -> list[str]:
    rows = [("cell", "head beside base", "on", "verdict")]
    rows += [
        (on_line(f.case), on_line(f.actual), on_line(" ".join(f.detail)), f"{f.check} {f.status.value}")
        for f in findings
    ]
    lines = ["", *table(rows)]
    for finding in findings:
        if finding.status in LOUD:
            lines += ["", *finding_lines(finding, colour)]
    return [*lines, "", *summary_lines(Verdict(tuple(findings)), colour)]
