"""`zerobench history`: many results, oldest first, and where they shifted."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from zerobench.commands_info import note
from zerobench.finding import Finding, Status, Verdict
from zerobench.history import NoChangePoints, Series, judge_exact, judge_time, series_of, spark
from zerobench.report.terminal import LOUD, finding_lines, summary_lines
from zerobench.report.text import colourful, on_line, table
from zerobench.store import Results, StoreError, read


class Refused(Exception):
    """What the command will not do, and why."""


def judged(arguments: Namespace) -> Verdict:
    """Read, judge and print. Raises Refused for a file, a date or a library that is not there."""
    results = _since(list(_results(arguments.result)), arguments.since)
    if arguments.suite:
        results = [result for result in results if result.provenance.suite == arguments.suite]
    series = series_of(results)
    try:
        timed = [judge_time(each, arguments.floor) for each in series]
    except NoChangePoints as error:
        raise Refused(str(error)) from None
    findings = [*timed, *judge_exact(results)]
    if arguments.select:
        findings = [f for f in findings if arguments.select in f.id]
    shown = [(s, f) for s, f in zip(series, timed, strict=True) if f in findings]
    verdict = Verdict(tuple(findings))
    print("\n".join(lines(len(results), shown, verdict, colourful(sys.stdout))))
    return verdict


def lines(count: int, series: Sequence[tuple[Series, Finding]], verdict: Verdict, colour: bool) -> list[str]:
    """A row a series, then what is wrong in full, then what shifted in the past, then the sum."""
    rows = [("step time", "on", "results", "oldest to newest", "now", "")]
    for each, finding in series:
        now = each.text(each.values[-1])
        rows.append(
            (
                on_line(each.run),
                on_line(each.hardware),
                str(len(each.points)),
                spark(each.values),
                on_line(now),
                finding.status.value,
            )
        )
    said = [f"{count} results", ""]
    if len(rows) > 1:
        said += [*table(rows, right=(2,)), ""]
    for finding in verdict.findings:
        if finding.status in LOUD:
            said += [*finding_lines(finding, colour), ""]
        elif finding.status is Status.PASS and finding.detail:
            said += [on_line(finding.id), *(f"  {on_line(line)}" for line in finding.detail), ""]
    return [*said, *summary_lines(verdict, colour)]


def _results(given: Sequence[str]) -> Iterator[Results]:
    """Every results file among the files and, folder by folder, in the folders."""
    for name in given:
        path = Path(name)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise Refused(f"{path}: no results (*.jsonl) in it; name a folder that `zerobench run` wrote to")
        for file in files:
            try:
                result = read(file)
            except StoreError as error:
                raise Refused(str(error)) from None
            for problem in result.problems:
                note(problem)
            yield result


def _since(results: list[Results], text: str | None) -> list[Results]:
    """Those that began at `text` or later."""
    if text is None:
        return results
    try:
        first = _moment(text)
    except ValueError:
        raise Refused(
            f"--since {text!r}: write a date such as 2026-11-29, or a time such as 2026-11-29T12:00"
        ) from None
    return [result for result in results if _moment(result.provenance.started) >= first]


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
