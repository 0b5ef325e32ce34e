"""What the charts of a page show, as numbers: from cases and records, before anything is drawn. Pure.

Charts are drawn where they add something: of an implementation and precision the model with the most world sizes (then
the largest), of a model and precision the largest world size. What is left out is in the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

from zerobench.analytic import state_nbytes
from zerobench.case import Case
from zerobench.checks.check import View, payload
from zerobench.checks.timing import slowest
from zerobench.checks.traffic import claimed_volume
from zerobench.claims import Recipe
from zerobench.record import Record, Sample
from zerobench.scenarios import SCENARIOS
from zerobench.stats import median_interval
from zerobench.terms import MODEL_STATES, Category, Collective, Moment

Runs = Sequence[tuple[Case, Record]]
MIN_LAUNCHES = 6  # from here on the median over launches has a 95 % interval


@dataclass(frozen=True)
class States:
    """Model states of an implementation against n. measured, formula: bytes a rank by n and category, the mean over
    ranks at BACKWARD of the last watched step."""

    implementation: str
    model: str
    precision: str
    psi: int
    measured: Mapping[int, Mapping[Category, float]]
    formula: Mapping[int, Mapping[Category, float]]


@dataclass(frozen=True)
class Traffic:
    """What implementations send in a step of one model, n and precision, in ring passes over Psi: by implementation and
    kind, the mean over ranks and measured steps; claimed: what each claims in total."""

    model: str
    n: int
    precision: str
    psi: int
    sent: Mapping[str, Mapping[Collective, float]]
    claimed: Mapping[str, float]

    def elements(self, passes: float) -> int:
        """Elements a rank and step on a ring."""
        return round(passes * self.psi * (self.n - 1) / self.n)


@dataclass(frozen=True)
class StepTime:
    """A case's step: median seconds of the slowest rank, and the 95 % interval of that median where there is enough to
    say one; of: what it is an interval of."""

    case: Case
    median_s: float
    low_s: float | None
    high_s: float | None
    of: str
    tokens_per_s: float


@dataclass(frozen=True)
class Point:
    """Bytes that a rank holds at one place of a step; bare: those of the same model run without an implementation."""

    phase: str
    place: str
    live: int
    bare: int | None


@dataclass(frozen=True)
class Timeline:
    """One rank's bytes through a step, in order. peaks: the most within each phase."""

    case: Case
    psi: int
    rank: int
    points: tuple[Point, ...]
    peaks: Mapping[str, int]


def plain_runs(cases: Sequence[Case], records: Mapping[str, Record]) -> Runs:
    """Each case with its plain run, where that completed and has what a figure needs."""
    found = ((case, records.get(case.run("plain").id)) for case in cases)
    return [(case, r) for case, r in found if r and r.status == "ok" and r.model and r.claims and r.samples]


def states(runs: Runs) -> list[States]:
    """One for each implementation and precision whose bytes were watched, in the order of the cases."""
    groups: dict[tuple[str, str], dict[str, list[tuple[Case, Record]]]] = defaultdict(lambda: defaultdict(list))
    for case, record in runs:
        if case.micro_batches == 1 and not case.options and all(_held(record)):
            groups[case.implementation, case.precision][case.model].append((case, record))
    return [_states(max(models.values(), key=lambda rows: (len(rows), _psi(rows[0][1])))) for models in groups.values()]


def traffic(runs: Runs) -> list[Traffic]:
    """One for each precision: the model and n > 1 that most implementations ran, of these the largest."""
    groups: dict[str, dict[tuple[str, int], list[tuple[Case, Record]]]] = defaultdict(lambda: defaultdict(list))
    for case, record in runs:
        if case.world_size > 1 and case.micro_batches == 1 and not case.options:
            groups[case.precision][case.model, case.world_size].append((case, record))
    return [
        _traffic(max(worlds.values(), key=lambda rows: (len(rows), rows[0][0].world_size, _psi(rows[0][1]))))
        for worlds in groups.values()
    ]


def step_times(runs: Runs, launches: Mapping[str, Sequence[Record]]) -> list[StepTime]:
    """One for each case whose bare steps were timed."""
    found = []
    for case, record in runs:
        if not any(sample.times_s for sample in record.samples):
            continue
        each, steps, model = [], [0.0], None
        for launch in launches.get(record.id, ()):
            times = [s.times_s for s in launch.samples]
            if launch.model and times and all(times):
                steps, model = slowest(times), launch.model
                each.append(median(steps))
        if model is None:
            continue
        several = len(each) >= MIN_LAUNCHES
        middle = median(each) if len(each) > 1 else sorted(steps)[len(steps) // 2]
        interval = median_interval(each if several else steps) if several or len(each) == 1 else None
        of = f"{len(each)} launches" if len(each) > 1 else f"{len(steps)} steps of one launch"
        tokens = model.tokens * case.micro_batches * case.world_size
        low, high = (interval.low, interval.high) if interval else (None, None)
        found.append(StepTime(case, middle, low, high, of, tokens / middle))
    return found


def timelines(runs: Runs) -> list[Timeline]:
    """One for each implementation and precision: its largest case by units, n and Psi, of that the fullest rank."""
    groups: dict[tuple[str, str], list[tuple[Case, Record]]] = defaultdict(list)
    for case, record in runs:
        if case.micro_batches == 1 and any(s.boundaries for s in record.samples):
            groups[case.implementation, case.precision].append((case, record))
    return [
        _timeline(*max(rows, key=lambda row: (_boundaries(row[1]), row[0].world_size, _psi(row[1]))))
        for rows in groups.values()
    ]


def _states(rows: Sequence[tuple[Case, Record]]) -> States:
    first, record = rows[-1]
    measured: dict[int, dict[Category, float]] = {}
    formula: dict[int, dict[Category, float]] = {}
    for case, each in sorted(rows, key=lambda row: row[0].world_size):
        n, held = case.world_size, [h for h in _held(each) if h]
        measured[n] = {c: sum(h.get(c.value, 0) for h in held) / len(held) for c in MODEL_STATES}
        claims = each.claims
        assert claims is not None
        recipe = claims.recipe or Recipe.of(case.precision)
        moments = SCENARIOS["plain"].optimizer.moments
        share = claims.shard_size if claims.shard_size and n % claims.shard_size == 0 else None
        due = state_nbytes(recipe, claims.stage, _psi(each), n, moments, shard_size=share)
        formula[n] = {c: float(due[c]) for c in MODEL_STATES}
    return States(first.implementation, first.model, first.precision, _psi(record), measured, formula)


def _traffic(rows: Sequence[tuple[Case, Record]]) -> Traffic:
    case, record = rows[0]
    n, psi = case.world_size, _psi(record)
    sent: dict[str, dict[Collective, float]] = {}
    claimed: dict[str, float] = {}
    for each, found in rows:
        assert found.model is not None
        steps = range(each.warmup, each.warmup + each.measured)
        total: dict[Collective, Fraction] = defaultdict(Fraction)
        for sample in found.samples:
            for call in payload(sample.calls, steps, found.model):
                if len(call.group) > 1:
                    total[call.kind] += call.numel * call.kind.wire_factor(len(call.group)) / Fraction(n - 1, n)
        sent[each.implementation] = {
            k: float(v / (len(found.samples) * len(steps) * psi)) for k, v in total.items() if v
        }
        claimed[each.implementation] = float(claimed_volume(View(each, {"plain": found}, record=found), 1))
    return Traffic(case.model, n, case.precision, psi, sent, claimed)


def _timeline(case: Case, record: Record) -> Timeline:
    last = case.warmup + case.measured - 1
    sample = max(record.samples, key=lambda s: max((b.live for b in s.boundaries), default=0))

    def held(step: int, moment: Moment, phase: str, place: str) -> list[Point]:
        return [Point(phase, place, h.live, None) for h in sample.holdings if h.step == step and h.moment is moment]

    def passed(phase: str) -> list[Point]:
        return [Point(phase, b.unit, b.live, b.bare) for b in sample.boundaries if b.step == last and b.phase == phase]

    points = [
        *held(last - 1, Moment.STEPPED, "forward", "begins"),
        *passed("forward"),
        *held(last, Moment.FORWARD, "backward", "begins"),
        *passed("backward"),
        *held(last, Moment.BACKWARD, "step", "begins"),
        *held(last, Moment.STEPPED, "step", "ends"),
    ]
    peaks = {p.phase: p.nbytes - p.backend for p in sample.peaks if p.step == last}
    return Timeline(case, _psi(record), sample.rank, tuple(points), peaks)


def _held(record: Record) -> list[Mapping[str, int]]:
    """By rank, what is claimed at BACKWARD of the last step; empty where it was not watched."""
    last = record.run.case.warmup + record.run.case.measured - 1

    def of(sample: Sample) -> Mapping[str, int]:
        return next((h.claimed for h in sample.holdings if h.step == last and h.moment is Moment.BACKWARD), {})

    return [of(sample) for sample in record.samples]


def _boundaries(record: Record) -> int:
    return max(len(s.boundaries) for s in record.samples)


def _psi(record: Record) -> int:
    return record.model.psi if record.model else 0
