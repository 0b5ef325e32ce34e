"""Step-time baselines: raw samples of several launches on one class of machine, and the coarse alarm over them.

A stored time was taken on another day, so it can only be a coarse alarm: slower by more than 10 %, and by more than
chance. The unit of replication is the launch. A closer look interleaves both sides on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerobench.baseline_file import SCHEMA, BaselineError, By, read, write
from zerobench.checks.timing import slowest
from zerobench.finding import Finding, Level, Status, worst
from zerobench.machine import MachineClass
from zerobench.record import Record
from zerobench.stats import median, rank_sum
from zerobench.store import Results
from zerobench.units import seconds_text

CHECK = "time.regression"
MIN_LAUNCHES = 5
"""At five against five the smallest one-sided p of the rank sum is 1/252, below ALPHA; at four it is 1/70, above it."""
ALPHA = 0.01
FLOOR = 0.10
REQUIREMENT = "a step is not slower than the baseline of its machine class by more than 10 % and by more than chance"

Times = tuple[tuple[float, ...], ...]
"""Seconds of each bare step, that of the slowest rank, by launch."""


@dataclass(frozen=True)
class TimeBaseline:
    """runs: samples by run id."""

    suite: str
    machine: MachineClass
    by: By
    runs: Mapping[str, Times]

    @classmethod
    def of(cls, results: Results) -> TimeBaseline:
        """`runs` is empty where the result timed nothing. Raises BaselineError for launches of two machine classes."""
        machines = {MachineClass.of(about).slug: MachineClass.of(about) for about in results.provenances.values()}
        if len(machines) > 1:
            a, b = list(machines.values())[:2]
            raise BaselineError(
                f"{results.path}: launches of two machine classes: {'; '.join(a.differences(b))}; --bytes keeps and compares "
                "the exact numbers alone"
            )
        timed = {run: times for run, each in results.launches.items() if (times := times_of(each))}
        return cls(results.provenance.suite, MachineClass.of(results.provenance), By.of(results.provenance), timed)

    @property
    def launches(self) -> int:
        """Of the run that has the fewest."""
        return min((len(times) for times in self.runs.values()), default=0)

    def save(self, path: Path) -> bool:
        """Whether anything changed. Raises BaselineError."""
        head = {"baseline": "times", "schema": SCHEMA, "suite": self.suite, "machine": self.machine, "by": self.by}
        return write(path, head, {"runs": self.runs})

    @classmethod
    def load(cls, path: Path) -> TimeBaseline:
        """Raises BaselineError, and FileNotFoundError where there is no such file."""
        document = read(path, "times")
        runs: dict[str, Times] = {}
        for name, launches in document.section(list[list[float]], "runs").items():  # type: ignore[type-abstract]
            if not all(launch and all(0 < t < 1e6 for t in launch) for launch in launches):
                raise document.error(f"{name}: a time that is not a positive number of seconds", "runs", name)
            runs[name] = tuple(tuple(launch) for launch in launches)
        machine = document.value(MachineClass, "machine")
        return cls(document.value(str, "suite"), machine, document.value(By, "by"), runs)


def times_of(launches: Sequence[Record]) -> Times:
    """The samples of a run's launches, those that were timed on every rank."""
    each = [[sample.times_s for sample in record.samples] for record in launches]
    return tuple(tuple(slowest(times)) for times in each if times and all(times))


def compare(new: TimeBaseline, old: TimeBaseline | None, cases: Mapping[str, Sequence[str]]) -> list[Finding]:
    """A finding a case that was timed, now or in the baseline: the worst of its runs. Both are of one machine class.

    cases: the runs of each case of the result.
    """
    before = old.runs if old else {}
    owner = {run: run.rpartition("@")[0] for run in (*new.runs, *before)} | {
        run: case for case, runs in cases.items() for run in runs
    }
    level = Level.MUST if new.machine.gates else Level.INFO
    by_case: dict[str, list[Finding]] = {}
    for run in dict.fromkeys([*new.runs, *before]):
        finding = Finding(new.suite, owner[run], CHECK, Status.PASS, REQUIREMENT, relation="within", level=level)
        said = _judge(finding, before.get(run, ()), new.runs.get(run, ()))
        said = replace(said, actual=f"{run.rpartition('@')[2]}: {said.actual}")
        by_case.setdefault(owner[run], []).append(said)
    return [next(f for f in each if f.status is worst(g.status for g in each)) for each in by_case.values()]


def _judge(finding: Finding, old: Times, new: Times) -> Finding:
    if not old or not new:
        there = "timed, not in the baseline" if new else "in the baseline, not timed"
        return replace(finding, status=Status.MISSING, actual=there)
    base, head = ([median(launch) for launch in side] for side in (old, new))
    ratio = median(head) / median(base)
    actual = (
        f"{seconds_text(median(head))}, {ratio - 1:+.1%} ({len(head)} launches, medians from {seconds_text(min(head))} "
        f"to {seconds_text(max(head))})"
    )
    finding = replace(
        finding,
        expected=f"at most {FLOOR:.0%} above {seconds_text(median(base))} ({len(base)} launches)",
        actual=actual,
        metrics=(("ratio", ratio),),
    )
    if min(len(base), len(head)) < MIN_LAUNCHES:
        few = "the result" if len(head) < MIN_LAUNCHES else "the baseline"
        detail = (
            f"{few} has fewer than {MIN_LAUNCHES} launches: zerobench run {finding.suite} --launches {MIN_LAUNCHES}",
        )
        return replace(finding, status=Status.INCONCLUSIVE, detail=detail)
    if ratio <= 1 + FLOOR:
        faster = ratio < 1 / (1 + FLOOR) and rank_sum(head, base) <= ALPHA
        return replace(
            finding, detail=("faster than the baseline: accept it, or it hides the next loss",) if faster else ()
        )
    p = rank_sum(base, head)
    if p > ALPHA:
        return replace(
            finding, status=Status.INCONCLUSIVE, detail=(f"launches overlap too much to tell (p = {p:.2g})",)
        )
    return replace(finding, status=Status.FAIL, detail=(f"p = {p:.2g}, one-sided, by the rank sum of launches",))
