"""Two sides whose launches took turns, cell by cell: from their records to findings. `zerobench ab` makes the records.

One implementation on both sides (two checkouts, two versions of torch) is time.regression: no slower than it was, beyond
the floor. Two implementations are time.relative: how much slower may head be for the stage that it claims?

The bound of time.relative. A stage's step moves k ring passes over Psi where base's moves k0, counted as the backend
sends them. Were a step nothing but communication, it would take k / k0 of base's time; computing takes the same on both
sides or, for a sharded optimizer, less. With time C for computing and W for the wire, (C + W k/k0) <= max(1, k/k0) (C + W),
and the same holds where the two overlap. So a step beyond max(1, k/k0) has costs that the stage does not explain.

gloo sends a reduce-scatter as an all-reduce (`gloo.py`), so there stages 1 and 2 move 3 passes where DDP moves 2 and the
bound is 1.5; a backend with a real reduce-scatter gives 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zerobench.analytic import collectives
from zerobench.case import Run
from zerobench.checks.timing import slowest
from zerobench.claims import Claims
from zerobench.finding import Finding, Level, Status
from zerobench.gloo import received_nbytes
from zerobench.record import Call, Record
from zerobench.sequential import FLOOR, MOST_ROUNDS, Decision, Pairs, decide
from zerobench.stats import Change, Ratio, median
from zerobench.terms import Collective
from zerobench.units import seconds_text

SUITE = "ab"
SIDES = ("base", "head")
REGRESSION = "a step of head takes no longer than one of base, launched in turn, by more than 3 % and more than chance"
RELATIVE = "a step takes no longer, beside base's of the same model, than what the stage puts on the wire explains"


@dataclass(frozen=True)
class Cell:
    """One comparison. base, head: their runs. launches: by side, in the order in which they were made; the last of a side
    may have failed, and then it is the last of all."""

    base: Run
    head: Run
    base_launches: tuple[Record, ...] = ()
    head_launches: tuple[Record, ...] = ()

    @property
    def name(self) -> str:
        return self.head.id

    @property
    def failed(self) -> Record | None:
        """The launch that did not give a time, and ended the cell."""
        for record in (*self.base_launches, *self.head_launches):
            if record.status != "ok":
                return record
        return None

    @property
    def pairs(self) -> Pairs:
        return Pairs(step_times(self.base_launches), step_times(self.head_launches))


def step_times(launches: Sequence[Record]) -> tuple[float, ...]:
    """One number a launch: the median over its bare steps of the slowest rank's seconds."""
    return tuple(median(slowest([s.times_s for s in record.samples])) for record in launches if record.status == "ok")


def judge_cells(cells: Sequence[Cell], backend: str, rounds: int = MOST_ROUNDS) -> list[Finding]:
    """A finding a cell, in their order."""
    decisions = decide({cell.name: cell.pairs for cell in cells if cell.failed is None}, rounds)
    return [_judge(cell, decisions.get(cell.name), backend) for cell in cells]


def wire_passes(claims: Claims, backend: str) -> Fraction:
    """What the stage puts on the wire in a step of one micro-batch, in ring passes over Psi."""
    times = collectives(claims.stage, 1, gathered=claims.gathered)
    return sum((count * _passes(kind, backend) for kind, count in times.items()), Fraction(0))


def _passes(kind: Collective, backend: str) -> Fraction:
    if backend != "gloo":
        return Fraction(kind.ring_passes)
    n, nbytes = 2, 4  # any will do: a pass moves (n - 1) / n of the tensor
    received = received_nbytes(Call(0, "", kind, nbytes, nbytes, "uint8", tuple(range(n))), 0)
    assert received is not None
    return received / (nbytes * Fraction(n - 1, n))


def _judge(cell: Cell, decision: Decision | None, backend: str) -> Finding:
    same = cell.base.case.implementation == cell.head.case.implementation
    finding = Finding(
        SUITE,
        cell.head.case.id,
        "time.regression" if same else "time.relative",
        Status.SKIP,
        REGRESSION if same else RELATIVE,
        relation="within",
        level=Level.MUST if same else Level.SHOULD,
    )
    if cell.failed is not None:
        kind = {"skip": Status.SKIP, "invalid": Status.INVALID}.get(cell.failed.status, Status.FAIL)
        check = finding.check if kind is not Status.FAIL else "runtime.completes"
        return replace(finding, check=check, status=kind, actual=f"{cell.failed.id}: {cell.failed.reason}")
    assert decision is not None
    finding = replace(finding, actual=_actual(cell, decision), detail=(_evidence(decision),))
    if decision.ratio is not None:
        finding = replace(finding, metrics=(("ratio", decision.ratio.ratio),))
    if same:
        floor = f"at most {FLOOR:.0%} above {_typical(cell.pairs.base)}"
        return replace(finding, expected=floor, status=_BY_CHANGE[decision.change])
    base, head = cell.base_launches, cell.head_launches
    if not base or not head or base[0].claims is None or head[0].claims is None:
        return replace(finding, status=Status.INCONCLUSIVE)
    ratio = wire_passes(head[0].claims, backend) / wire_passes(base[0].claims, backend)
    bound = max(Fraction(1), ratio) if cell.head.case.world_size > 1 else Fraction(1)
    says = f"at most {float(bound):.3g} x {_typical(cell.pairs.base)}, the wire's share over {backend} were it the whole step"
    return replace(finding, expected=says, status=_within(decision, float(bound)))


_BY_CHANGE = {
    Change.SLOWER: Status.FAIL,
    Change.FASTER: Status.PASS,
    Change.SAME: Status.PASS,
    Change.INCONCLUSIVE: Status.INCONCLUSIVE,
}


def _within(decision: Decision, bound: float) -> Status:
    """Where the interval lies beside the bound and the floor above it. A ratio at or below 1 is within any bound."""
    if decision.change in (Change.SAME, Change.FASTER):
        return Status.PASS
    if not decision.enough or decision.ratio is None or decision.ratio.interval is None:
        return Status.INCONCLUSIVE
    if decision.ratio.interval.high <= bound * (1 + FLOOR):
        return Status.PASS
    if decision.change is Change.SLOWER and decision.ratio.interval.low > bound * (1 + FLOOR):
        return Status.FAIL
    return Status.INCONCLUSIVE


def _actual(cell: Cell, decision: Decision) -> str:
    times = f"{_typical(cell.pairs.head)} beside {_typical(cell.pairs.base)}"
    if decision.ratio is None:
        return f"{decision.change.value}: {times}; too few pairs to compare"
    return f"{decision.change.value}: {change_text(decision.ratio)}; medians {times}"


def change_text(ratio: Ratio) -> str:
    """ "+12.3 % (95 % interval +8.1 % to +15.9 %)"."""
    between = ratio.interval
    if between is None:
        return f"{ratio.ratio - 1:+.1%}"
    return (
        f"{ratio.ratio - 1:+.1%} ({between.confidence:.1%} interval {between.low - 1:+.1%} to {between.high - 1:+.1%})"
    )


def _evidence(decision: Decision) -> str:
    if not decision.enough:
        return f"{decision.screened} pairs of launches, fewer than the rule asks for"
    if decision.confirmed:
        return f"suspected after {decision.screened} pairs, judged on {decision.confirmed} fresh ones (p = {decision.p:.2g})"
    return f"{decision.screened} pairs of launches"


def _typical(times: Sequence[float]) -> str:
    return seconds_text(median(times)) if times else "nothing"


def cells_of(launches: Mapping[str, Sequence[Record]], runs: Sequence[tuple[Run, Run]]) -> list[Cell]:
    """The cells of `runs`, with what each side launched, in order. launches: by side, see SIDES."""
    by_run: dict[tuple[str, str], list[Record]] = {}
    for side in SIDES:
        for record in launches[side]:
            by_run.setdefault((side, record.id), []).append(record)
    return [
        Cell(base, head, tuple(by_run.get(("base", base.id), ())), tuple(by_run.get(("head", head.id), ())))
        for base, head in runs
    ]
