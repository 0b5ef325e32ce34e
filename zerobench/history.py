"""Results over months: where a level shifted, and how today compares with the first level, not only with the last.

A series is one run on one kind of hardware, result after result; what a level is made of are medians of step times, a
number a result. torch, the backend and the driver do not divide a series: that they changed is what one wants to see.
Where the same result has DDP's time of the same job, the number is the ratio to it, from which clocks and load cancel.

Shifts are found on ranks, so that outliers and the distribution do not matter (Lung-Yut-Fong, Levy-Leduc and Cappe
2015), by ruptures' PELT. A split of N values into a first k and the rest gains n1 m1^2/s^2 + n2 m2^2/s^2, with the mean
centred ranks m of both sides and the variance s^2 of all ranks. What a split must gain is the value that the best of all
splits of N values in random order exceeds with probability ALPHA: a series in which nothing happened is split with that
probability, whatever its noise. Small losses that no split shows add up: so the newest values are also compared with the
first ones, by the rank sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from zerobench.baseline import BYTES, TRAFFIC, Difference, Exact, differences_of
from zerobench.baseline_times import times_of
from zerobench.finding import Finding, Level, Status
from zerobench.machine import MachineClass
from zerobench.record import Provenance, Record
from zerobench.stats import median, rank_sum
from zerobench.store import Results
from zerobench.units import seconds_text

TIME, EXACT = "history.time", "history.exact"
ALPHA = 0.01
FLOOR = 0.03
MIN_LEVEL = 5
"""Values that a level needs: five against five is the least at which a rank sum can fall below ALPHA."""
MOST = 10
"""Values of either end that are compared: more would let the middle of a slow drift hide it."""
YARDSTICKS = ("torch-ddp", "ddp")
"""Implementations by whose time others are divided, the first that the result has."""
REQUIREMENT = {
    TIME: "a step takes no longer than at the first level and at the last, by more than chance and by more than a trifle",
    EXACT: "bytes and collectives are those of the result before",
}


class NoChangePoints(Exception):
    """The library that finds shifts is not installed."""


@dataclass(frozen=True)
class Point:
    """What one result says of a run. value: median step, in seconds or as a ratio to `yardstick`'s."""

    about: Provenance
    value: float


@dataclass(frozen=True)
class Series:
    """One run on one kind of hardware, oldest first. unit: "s", or the implementation that it is divided by."""

    suite: str
    run: str
    hardware: str
    unit: str
    points: tuple[Point, ...]
    gates: bool

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    def text(self, value: float) -> str:
        return seconds_text(value) if self.unit == "s" else f"{value:.3f} of {self.unit}"


@dataclass(frozen=True)
class Segment:
    """Values start to stop of a series, of one level: their median."""

    start: int
    stop: int
    level: float


def series_of(results: Iterable[Results]) -> list[Series]:
    """Every timed run of these results. Results that failed are left out run by run, not whole."""
    points: dict[tuple[str, str, str, str], list[Point]] = defaultdict(list)
    gates: dict[str, bool] = {}
    for result in _in_order(results):
        about = result.provenance
        machine = MachineClass.of(about)
        hardware = f"{machine.device} x{machine.count} {machine.interconnect}".strip()
        gates[hardware] = machine.gates
        medians = {run: _median_of(launches) for run, launches in result.launches.items()}
        for run, value in medians.items():
            if value is None:
                continue
            unit, against = _yardstick(run, medians)
            points[about.suite, run, hardware, unit].append(Point(about, value / against))
    return [Series(*key, tuple(found), gates[key[2]]) for key, found in sorted(points.items())]


def _median_of(launches: Sequence[Record]) -> float | None:
    """The median over launches of a launch's median step."""
    times = times_of(launches)
    return median([median(each) for each in times]) if times else None


def _yardstick(run: str, medians: Mapping[str, float | None]) -> tuple[str, float]:
    """DDP's time of the same job, if the result has it; for DDP itself, and without, seconds."""
    name, slash, job = run.partition("/")
    for other in YARDSTICKS:
        seconds = medians.get(f"{other}{slash}{job}")
        if name not in YARDSTICKS and seconds:
            return other, seconds
    return "s", 1.0


def _in_order(results: Iterable[Results]) -> list[Results]:
    return sorted(results, key=lambda result: result.provenance.started)


def segments(values: Sequence[float]) -> list[Segment]:
    """The levels of a series, oldest first; one where nothing shifted or there are too few values to tell.

    Raises NoChangePoints where ruptures is not installed.
    """
    try:
        import numpy as np
        import ruptures
    except ImportError:
        raise NoChangePoints("history needs ruptures: pip install 'zerobench[history]'") from None
    ends = [len(values)]
    if len(values) >= 2 * MIN_LEVEL and len(set(values)) > 1:
        search = ruptures.Pelt(model="rank", min_size=MIN_LEVEL, jump=1).fit(np.asarray(values, dtype=float))
        ends = search.predict(pen=penalty(len(values)))
    starts = [0, *ends[:-1]]
    return [Segment(a, b, median(values[a:b])) for a, b in zip(starts, ends, strict=True)]


@cache
def penalty(count: int) -> float:
    """What the best split of `count` values in random order gains at most, but with probability ALPHA.

    By 20 000 permutations from a fixed seed; the whole series' own gain is none, since centred ranks have mean 0.
    """
    import numpy as np

    generator = np.random.default_rng(20191004)
    ranks = np.arange(1, count + 1) - (count + 1) / 2
    first = np.arange(MIN_LEVEL, count - MIN_LEVEL + 1)
    best = []
    for _ in range(20_000):
        sums = np.cumsum(generator.permutation(ranks))[first - 1]
        best.append(float((sums**2 * (1 / first + 1 / (count - first))).max()))
    return float(np.quantile(best, 1 - ALPHA)) / float(ranks.var())


def judge_time(series: Series, floor: float = FLOOR) -> Finding:
    """Whether the newest level is slower than the one before it, or the newest values than the first ones."""
    finding = _blank(series.suite, series.run, TIME)
    finding = replace(finding, relation="within", level=Level.MUST if series.gates else Level.INFO)
    values = series.values
    if len(values) < 2 * MIN_LEVEL:
        said = f"{len(values)} results on {series.hardware}; a shift needs {2 * MIN_LEVEL}"
        return replace(finding, status=Status.SKIP, actual=said)
    levels = segments(values)
    new = levels[-1]
    wrong = []
    if len(levels) > 1 and (ratio := new.level / levels[-2].level) > 1 + floor:
        wrong.append(f"{ratio - 1:+.1%} against the level before")
    first, last = values[:MOST][: len(values) // 2], values[-MOST:][-(len(values) // 2) :]
    drift = median(last) / median(first)
    if drift > 1 + floor and rank_sum(first, last) <= ALPHA:
        wrong.append(f"{drift - 1:+.1%} against the first {len(first)} results")
    return replace(
        finding,
        status=Status.FAIL if wrong else Status.PASS,
        expected=f"at most {floor:.0%} above {series.text(levels[0].level)}, the first level, and above the last",
        actual=f"{series.text(new.level)}: " + ("; ".join(wrong) or f"{len(levels)} level{'s' * (len(levels) > 1)}"),
        detail=tuple(shift_text(series, a, b) for a, b in pairwise(levels)),
        metrics=(("level", new.level), ("drift", drift), ("levels", float(len(levels)))),
    )


def shift_text(series: Series, before: Segment, after: Segment) -> str:
    """One shift in a sentence: when, by how much, and what else changed there."""
    old, new = series.points[after.start - 1].about, series.points[after.start].about
    changed = "; ".join(what_changed(old, new)) or "nothing that a result records"
    by = after.level / before.level - 1
    return f"{new.started}: {series.text(before.level)} to {series.text(after.level)} ({by:+.1%}); changed: {changed}"


def what_changed(old: Provenance, new: Provenance) -> list[str]:
    """What a result records of its surroundings and that is not what it was: "torch 2.11.0 to 2.13.0"."""
    names = ("zerobench", "torch", "backend", "driver", "python", "kernel", "host", "interconnect", "suite_digest")
    told = [
        f"{name} {getattr(old, name) or '(none)'} to {getattr(new, name) or '(none)'}"
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]
    if old.commit != new.commit:
        told.append(f"commit {(old.commit or '(none)')[:12]} to {(new.commit or '(none)')[:12]}")
    for name in sorted({*old.environment, *new.environment}):
        a, b = old.environment.get(name, "(unset)"), new.environment.get(name, "(unset)")
        if a != b:
            told.append(f"{name} {a} to {b}")
    return told


def judge_exact(results: Iterable[Results]) -> list[Finding]:
    """A finding a run that two results or more have: whether the newest changed, and what changed before."""
    runs: dict[tuple[str, str], list[tuple[Provenance, Exact]]] = defaultdict(list)
    for result in _in_order(results):
        for run, launches in result.launches.items():
            runs[result.provenance.suite, run].append((result.provenance, Exact.of(launches[-1])))
    findings = []
    for (suite, run), points in sorted(runs.items()):
        if len(points) < 2:
            continue
        changes = []
        for (old, a), (new, b) in pairwise(points):
            if a != b:
                found = _told(run, a, b)
                what = "; ".join(what_changed(old, new)) or "nothing that a result records"
                more = f", and {len(found) - 1} more" if len(found) > 1 else ""
                changes.append(f"{new.started}: {found[0].text}{more}; changed: {what}")
        holds = points[-1][1] == points[-2][1]
        past = f"{len(points)} results, {len(changes)} changes among them"
        findings.append(
            replace(
                _blank(suite, run, EXACT),
                status=Status.PASS if holds else Status.FAIL,
                relation="==",
                expected=f"what {points[-2][0].started} had",
                actual=(past if changes else f"{len(points)} results, all equal") if holds else changes[-1],
                detail=tuple(changes if holds else changes[:-1]),
            )
        )
    return findings


def _told(run: str, old: Exact, new: Exact) -> list[Difference]:
    return [d for check in (BYTES, TRAFFIC) for d in differences_of(run, old.numbers(check), new.numbers(check))]


def _blank(suite: str, run: str, check: str) -> Finding:
    return Finding(suite, run, check, Status.PASS, REQUIREMENT[check])


def spark(values: Sequence[float], width: int = 40) -> str:
    """The newest `width` values as a line of bars, for a terminal: low to high over their own range."""
    shown = list(values)[-width:]
    low, high = min(shown), max(shown)
    bars = "▁▂▃▄▅▆▇█"
    if math.isclose(low, high):
        return bars[0] * len(shown)
    return "".join(bars[round((v - low) / (high - low) * (len(bars) - 1))] for v in shown)
