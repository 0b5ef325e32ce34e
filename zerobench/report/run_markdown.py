"""A verdict as Markdown: the sentence, the table of cases, failures in full, and what holds summed up.

For a file, or for the summary of a step in GitHub Actions, which takes 1 MiB a step and drops all of a longer one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerobench.case import Case
from zerobench.finding import Finding, Level, Status, Verdict
from zerobench.record import Provenance, Record
from zerobench.report.headline import headline, loud, skips
from zerobench.report.matrix import Matrix, verdicts, versions
from zerobench.report.matrix_markdown import cell, code, escape
from zerobench.report.terminal import case_rows

SUMMARY = "GITHUB_STEP_SUMMARY"
SUMMARY_NBYTES = 1 << 20


def run_lines(
    verdict: Verdict, cases: Sequence[Case], records: Mapping[str, Record], about: Provenance, source: str
) -> list[str]:
    """Lines of a whole document about a run. source: the results file, as the reader may type it."""
    matrix = Matrix()
    matrix.add(about, cases, verdict.findings)
    head, *rows = case_rows(cases, records, verdict)
    table = [_row(head), "|---" * len(head) + "|", *(_row([cell(row[0]), *map(escape, row[1:])]) for row in rows)]
    return [
        *_top(verdict, cases, "cases"),
        escape(versions(about)),
        "",
        *table,
        "",
        *_findings(verdict, lambda f: matrix.command(f) if f.case in matrix.cases else ""),
        f"All findings: {code(f'zerobench report {source}')}",
    ]


def compare_lines(verdict: Verdict, source: str) -> list[str]:
    """Lines of a whole document about a comparison with baselines."""
    return [*_top(verdict, (), "runs"), *_findings(verdict, lambda _: ""), f"Compared: {code(source)}"]


def append_summary(lines: Callable[[], Sequence[str]], where: str) -> str:
    """Append what `lines` gives to the summary of the step, where GitHub Actions asks for one; what kept it from that,
    or "".

    where: what a reader is pointed to where lines had to be left out.
    """
    name = os.environ.get(SUMMARY)
    if not name:
        return ""
    path = Path(name)
    try:
        there = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as out:
            out.write("\n".join([*within(lines(), SUMMARY_NBYTES - there, where), ""]))
    except OSError as error:
        return f"{SUMMARY}: {path}: {error.strerror}"
    return ""


def within(lines: Sequence[str], nbytes: int, where: str) -> list[str]:
    """`lines` where they fit into `nbytes` with their line ends; else as many of the first as do, and a sentence that
    says how many are left out and where they are."""
    if sum(len(line.encode()) + 1 for line in lines) <= nbytes:
        return list(lines)
    room = nbytes - 400 - len(where.encode())
    kept: list[str] = []
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.append(line)
    if room < -nbytes or nbytes < 400 + len(where.encode()):
        return []
    said = f"Cut here: {len(lines) - len(kept)} of {len(lines)} lines are left out, to stay within 1 MiB. All of them: {code(where)}"
    return [*kept, "", said]


def _top(verdict: Verdict, cases: Sequence[Case], subject: str) -> list[str]:
    head = headline(verdict, cases, subject)
    counts = ", ".join(f"{count} {word}" for word, count in head.counts) or "none"
    return [f"## {head.sentence}", "", f"{len(verdict.findings)} findings: {counts}.", ""]


def _findings(verdict: Verdict, command: Callable[[Finding], str]) -> list[str]:
    lines: list[str] = []
    for finding in loud(verdict.findings):
        lines += _in_full(finding, command(finding))
    known = [f for f in verdict.findings if f.status is Status.XFAIL]
    if known:
        lines += ["### Known deviations", ""]
        lines += [f"- {code(f.case)} {f.check}: {escape(f.actual)}; {escape(f.detail[-1])}" for f in known]
        lines.append("")
    passed = Counter(f.check for f in verdict.findings if f.status is Status.PASS)
    if passed:
        said = ", ".join(f"{check} × {count}" for check, count in sorted(passed.items()))
        lines += [f"Holds ({passed.total()}): {said}.", ""]
    reasons = skips(verdict.findings)
    if reasons:
        lines += ["<details><summary>What did not apply, and why</summary>", ""]
        for reason, checks in reasons:
            lines.append(f"- {escape(reason)}: {', '.join(f'{check} × {n}' for check, n in checks.items())}")
        lines += ["", "</details>", ""]
    return lines


def _in_full(finding: Finding, command: str) -> list[str]:
    level = "" if finding.level is Level.MUST else f" ({finding.level.value})"
    lines = [f"### {finding.status.value.upper()} {code(finding.id)}{level}", ""]
    lines.append(f"- requirement: {escape(finding.requirement)}")
    if finding.expected:
        lines.append(f"- expected: {escape(finding.expected)}")
    lines.append(f"- actual: {escape(finding.actual)}")
    if finding.claim is not finding.paper:
        lines.append(f"- verdicts: {verdicts(finding)}")
    lines += [f"- {escape(line)}" for line in finding.detail]
    if command:
        lines.append(f"- again: {code(command)}")
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
