"""Two sides whose launches took turns, cell by cell: from their records to findings. `zerobench ab` makes the records.

One implementation on both sides (two checkouts, two versions of torch) is time.regression: it may not be slower than it
was, by more than chance and by more than the floor. Two implementations are time.relative: head may be slower by what
its stage puts on the wire.

The bound of time.relative. A step's time is a function f(C, W) of the seconds that computing and the wire would take
alone. However they overlap, f grows with both, and in proportion where both do. If head's stage moves r > 1 times
base's bytes, as the backend sends them, and computes no more (a sharded optimizer computes less), its step takes at
most f(C, r W) <= f(r C, r W) = r f(C, W): r times base's. A step beyond that has costs that its stage does not explain.

gloo sends a reduce-scatter as an all-reduce (`gloo.py`), so there stages 1 and 2 move 3 Psi where DDP moves 2 and the
bound is 1.5; a backend with a real reduce-scatter gives 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerobench.analytic import sent_numel
from zerobench.case import Run
from zerobench.checks.timing import slowest
from zerobench.claims import Recipe
from zerobench.finding import Finding, Level, Status
from zerobench.gloo import received_nbytes
from zerobench.record import Call, Record
from zerobench.sequential import ALPHA, FLOOR, MOST_ROUNDS, Decision, Pairs, decide
from zerobench.stats import Change, Ratio, median
from zerobench.terms import DTYPE_NBYTES, Collective
from zerobench.units import seconds_text

SUITE = "ab"
SIDES = ("base", "head")
REGRESSION = (
    "a step of head is not slower than one of base, launched in turns, by more than 3 % and by more than chance"
)
RELATIVE = "a step is not slower, beside base's of the same model, than what its stage puts on the wire explains"
_BY_CHANGE = {
    Change.SLOWER: Status.FAIL,
    Change.FASTER: Status.PASS,
    Change.SAME: Status.PASS,
    Change.INCONCLUSIVE: Status.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Cell:
    """One comparison: the runs of both sides, and their launches in the order in which they were made."""

    base: Run
    head: Run
    base_launches: tuple[Record, ...] = ()
    head_launches: tuple[Record, ...] = ()

    @property
    def name(self) -> str:
        return self.head.id

    @property
    def same(self) -> bool:
        """Whether both sides are one implementation."""
        return self.base.case.implementation == self.head.case.implementation

    @property
    def failed(self) -> Record | None:
        """The launch that gave no time: it ends the cell."""
        return next((r for r in (*self.base_launches, *self.head_launches) if r.status != "ok"), None)

    @property
    def pairs(self) -> Pairs:
        return Pairs(step_times(self.base_launches), step_times(self.head_launches))


def cells_of(launches: Mapping[str, Sequence[Record]], runs: Sequence[tuple[Run, Run]]) -> list[Cell]:
    """The cells of `runs`, (base, head) each, with what was launched of them. launches: by side, in order."""

    def mine(side: str, run: Run) -> tuple[Record, ...]:
        return tuple(record for record in launches[side] if record.id == run.id)

    return [Cell(base, head, mine("base", base), mine("head", head)) for base, head in runs]


def step_times(launches: Sequence[Record]) -> tuple[float, ...]:
    """One number a launch: the median over its bare steps of the slowest rank's seconds."""
    return tuple(median(slowest([s.times_s for s in record.samples])) for record in launches if record.status == "ok")


def judge_cells(cells: Sequence[Cell], backend: str, rounds: int = MOST_ROUNDS) -> list[Finding]:
    """A finding a cell, in their order."""
    decisions = decide({cell.name: cell.pairs for cell in cells if cell.failed is None}, rounds)
    tail = ALPHA / max(1, sum(1 for d in decisions.values() if d.confirmed))
    return [_judge(cell, decisions.get(cell.name), backend, tail) for cell in cells]


def wire_nbytes(launch: Record, backend: str) -> Fraction:
    """What a rank moves in a step of its stage and dtypes: a ring's bytes, or as many as gloo makes of them."""
    assert launch.claims is not None and launch.model is not None
    claims, case = launch.claims, launch.run.case
    recipe = claims.recipe or Recipe.of(case.precision)
    sent = sent_numel(
        claims.stage,
        launch.model.psi,
        case.world_size,
        case.micro_batches,
        gathered=claims.gathered,
        reduce_each=claims.reduce_each,
        shard_size=claims.shard_size,
    )
    weight, gradient = recipe.gather or recipe.parameter, recipe.reduce or recipe.gradient
    return sum(
        (
            numel * DTYPE_NBYTES[weight if kind is Collective.ALL_GATHER else gradient] * _surcharge(kind, backend)
            for kind, numel in sent.items()
        ),
        Fraction(0),
    )


def _surcharge(kind: Collective, backend: str) -> Fraction:
    """How many times a ring's bytes the backend sends for a collective of this kind; the same at every n and size."""
    if backend != "gloo":
        return Fraction(1)
    received = received_nbytes(Call(0, "", kind, 2, 2, "uint8", (0, 1)), 0)
    assert received is not None
    return received / (2 * kind.wire_factor(2))


def _judge(cell: Cell, decision: Decision | None, backend: str, tail: float) -> Finding:
    finding = Finding(
        SUITE,
        cell.head.case.id,
        "time.regression" if cell.same else "time.relative",
        Status.SKIP,
        REGRESSION if cell.same else RELATIVE,
        relation="within",
        level=Level.MUST if cell.same else Level.SHOULD,
    )
    if cell.failed is not None:
        actual = f"{cell.failed.id}: {cell.failed.reason}"
        if cell.failed.status == "error":
            return replace(finding, check="runtime.completes", level=Level.MUST, status=Status.FAIL, actual=actual)
        return replace(finding, status=Status(cell.failed.status), actual=actual)
    assert decision is not None
    times = f"medians {_typical(cell.pairs.head)} beside {_typical(cell.pairs.base)}"
    said = (
        f"{decision.change.value}: {change_text(decision.ratio)}; {times}" if decision.ratio else f"undecided; {times}"
    )
    finding = replace(finding, actual=said, detail=(evidence_text(decision),))
    if decision.ratio is None or cell.same:
        limit = f"at most {FLOOR:.0%} slower"
        return replace(finding, expected=limit, status=_BY_CHANGE[decision.change], metrics=_metrics(decision))
    base, head = (wire_nbytes(side[0], backend) for side in (cell.base_launches, cell.head_launches))
    bound = max(Fraction(1), head / base) if base else Fraction(1)
    limit = f"at most {FLOOR:.0%} slower"
    if bound > 1:
        limit = f"at most {float(bound):.3g} x base: its stage moves so many times base's bytes over {backend}"
    status = _within(cell, decision, float(bound), tail)
    return replace(finding, expected=limit, status=status, metrics=(*_metrics(decision), ("bound", float(bound))))


def _within(cell: Cell, decision: Decision, bound: float, tail: float) -> Status:
    """Where the interval lies beside the bound. tail: of an interval that holds for all suspected cells together."""
    if bound == 1 or decision.change in (Change.SAME, Change.FASTER):
        return _BY_CHANGE[decision.change]
    between = decision.ratio.interval if decision.ratio else None
    if between is None:
        return Status.INCONCLUSIVE
    if between.high <= bound:
        return Status.PASS
    if decision.change is Change.SLOWER:
        start = decision.screened
        strict = cell.pairs.ratio(start, start + decision.confirmed, tail).interval
        if strict is not None and strict.low > bound:
            return Status.FAIL
    return Status.INCONCLUSIVE


def _metrics(decision: Decision) -> tuple[tuple[str, float], ...]:
    ratio = decision.ratio
    if ratio is None or ratio.interval is None:
        return ()
    return (("ratio", ratio.ratio), ("low", ratio.interval.low), ("high", ratio.interval.high))


def change_text(ratio: Ratio) -> str:
    """ "+12.3 % (96.1 % interval +8.1 % to +15.9 %)"."""
    centre, between = f"{100 * (ratio.ratio - 1):+.1f} %", ratio.interval
    if between is None:
        return centre
    low, high = (f"{100 * (end - 1):+.1f} %" for end in (between.low, between.high))
    return f"{centre} ({100 * between.confidence:.1f} % interval {low} to {high})"


def evidence_text(decision: Decision) -> str:
    """What the decision rests on."""
    if not decision.enough:
        return "fewer pairs of launches than the rule asks for"
    if decision.confirmed:
        after = f"suspected after {decision.screened} pairs"
        return f"{after}, judged on {decision.confirmed} fresh ones, p = {decision.p:.2g}"
    return f"{decision.screened} pairs of launches"


def _typical(times: Sequence[float]) -> str:
    return seconds_text(median(times)) if times else "none"
