"""`zerobench accept` and `zerobench compare`: a result and the baselines of its suite."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from zerobench import baseline_file, baseline_times
from zerobench.baseline import ByteBaseline, compare, runs_of
from zerobench.baseline_file import BaselineError
from zerobench.baseline_times import MIN_LAUNCHES, TimeBaseline
from zerobench.finding import Finding, Verdict
from zerobench.report.terminal import LOUD, finding_lines, summary_lines
from zerobench.report.text import clean, colourful
from zerobench.store import Results, StoreError, read, uncollected

T = TypeVar("T")


class Refused(Exception):
    """What the command will not do, and why. code: the exit code."""

    def __init__(self, what: str, code: int = 2) -> None:
        super().__init__(what)
        self.code = code


@uncollected()
def accepted(arguments: Namespace) -> list[str]:
    """Write the baselines that a result makes; a line a file. Raises Refused, having written nothing."""
    results = _results(arguments.result)
    folder = Path(arguments.baselines)
    new, times = _loaded(lambda: ByteBaseline.of(results)), None
    if not arguments.bytes:
        times = _loaded(lambda: TimeBaseline.of(results))
        if times.runs and times.launches < MIN_LAUNCHES:
            raise Refused(
                f"{results.path}: {times.launches} launches of a timed run, and step times need {MIN_LAUNCHES}: "
                f"zerobench run {new.suite} --launches {MIN_LAUNCHES}, or accept --bytes for the exact numbers alone",
                6,
            )
    path = bytes_path(folder, new.suite)
    old = _maybe(lambda: ByteBaseline.load(path))
    lost = [case for case in old.cases if case not in new.cases] if old else []
    if lost and not arguments.drop:
        raise Refused(
            f"{path}: has {len(lost)} cases that the result lacks ({lost[0]}, ...): run the whole suite, or --drop them"
        )
    lines = [_said(path, _loaded(lambda: new.save(path)), f"{len(new.cases)} cases, {len(new.runs)} runs")]
    if times and times.runs:
        path = times_path(folder, times)
        said = f"{len(times.runs)} runs of {times.launches} launches or more"
        lines.append(_said(path, _loaded(lambda: times.save(path)), said))
    return lines


@uncollected()
def compared(arguments: Namespace) -> Verdict:
    """Compare a result with its baselines and print what differs. Raises Refused."""
    results = _results(arguments.result)
    given = Path(arguments.baseline)
    findings: list[Finding] = []
    if given.suffix != ".json":
        findings += _bytes(results, bytes_path(given, results.provenance.suite))
        if not arguments.bytes:
            findings += _times(results, given, None)
    elif _kind(given) == "times":
        findings += _times(results, given, given)
    else:
        findings += _bytes(results, given)
    if arguments.select:
        from zerobench.suite import select_ids

        kept = select_ids(arguments.select, (f.id for f in findings))
        findings = [f for f in findings if f.id in kept]
    verdict = Verdict(tuple(findings))
    colour = colourful(sys.stdout)
    for finding in findings:
        if finding.status in LOUD:
            print("\n".join([*finding_lines(finding, colour), ""]))
    print("\n".join(summary_lines(verdict, colour)))
    return verdict


def bytes_path(folder: Path, suite: str) -> Path:
    return folder / "bytes" / f"{suite}.json"


def times_path(folder: Path, times: TimeBaseline) -> Path:
    return folder / times.machine.slug / f"{times.suite}.json"


def reasons_of(results: Results) -> dict[str, str]:
    """Why a run has no completed launch, by run id."""
    return {id: f"{r.status}: {r.reason}" for id, r in results.records.items() if r.status != "ok"}


def _bytes(results: Results, path: Path) -> list[Finding]:
    baseline = _maybe(lambda: ByteBaseline.load(path))
    if baseline is None:
        raise Refused(f"no baseline {path}; make it: zerobench accept {results.path} --bytes", 4)
    _same_suite(results, baseline.suite, path)
    return compare(baseline, runs_of(results.provenance), results.launches, reasons_of(results))


def _times(results: Results, folder: Path, path: Path | None) -> list[Finding]:
    new = _loaded(lambda: TimeBaseline.of(results))
    path = path or times_path(folder, new)
    old = _maybe(lambda: TimeBaseline.load(path))
    if old is not None:
        _same_suite(results, old.suite, path)
        if apart := old.machine.differences(new.machine):
            raise Refused(
                f"{path}: step times of another machine class: {'; '.join(apart)}; name the folder, which has a file a class"
            )
    elif new.runs:
        print(
            f"note: no step times of this machine class yet ({new.machine.slug}); make them: "
            f"zerobench run {new.suite} --launches {MIN_LAUNCHES}, then zerobench accept RESULT",
            file=sys.stderr,
        )
    return baseline_times.compare(new, old, runs_of(results.provenance))


def _same_suite(results: Results, suite: str, path: Path) -> None:
    if suite != results.provenance.suite:
        raise Refused(
            f"{path}: a baseline of suite {suite!r}, not of {results.provenance.suite!r}; name a result and a baseline of one"
        )


def _results(name: str) -> Results:
    try:
        results = read(Path(name))
    except StoreError as error:
        raise Refused(clean(str(error))) from None
    if not re.fullmatch(r"[a-z0-9-]+", results.provenance.suite):  # it becomes part of a path
        called = clean(results.provenance.suite)[:200]
        raise Refused(
            f"{name}: no suite is called {called!r}: small letters, digits and - only; it becomes a file's name"
        )
    for problem in results.problems:
        print(f"note: {clean(problem)}", file=sys.stderr)
    return results


def _kind(path: Path) -> str:
    try:
        return str(_loaded(lambda: baseline_file.read(path)).data["baseline"])
    except FileNotFoundError:
        raise Refused(f"{path}: there is no such file; `zerobench accept RESULT` makes one") from None


def _loaded(load: Callable[[], T]) -> T:
    try:
        return load()
    except BaselineError as error:
        raise Refused(clean(str(error))) from None


def _maybe(load: Callable[[], T]) -> T | None:
    """What `load` gives; None where there is no such file."""
    try:
        return _loaded(load)
    except FileNotFoundError:
        return None


def _said(path: Path, written: bool, what: str) -> str:
    return f"{path}: {what}" if written else f"{path}: unchanged ({what})"
