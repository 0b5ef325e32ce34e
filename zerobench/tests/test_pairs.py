"""Findings of a comparison, from records made by hand: which check speaks, against which bound, and what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zerobench.case import Case
from zerobench.checks.pairs import Cell, cells_of, judge_cells, step_times, wire_nbytes
from zerobench.claims import Claims, Recipe
from zerobench.finding import Finding, Level, Status
from zerobench.record import Record
from zerobench.stats import median
from zerobench.terms import Stage
from zerobench.tests.made import record

PAIRS = 14


def launch(name: str, seconds: float, stage: Stage = Stage.GRADIENT, **more: object) -> Record:
    case = Case(name, name, "gpt-tiny", 4, "fp32")
    return record("timed", case, change=lambda s: replace(s, times_s=(seconds,) * 3), claims=Claims(stage), **more)


def cell(base: str, head: str, ratio: float, *, wobble: float = 0.004, pairs: int = PAIRS, **claims: Stage) -> Cell:
    logs = [math.log(ratio) + wobble * math.sin(3.1 * i) for i in range(pairs)]
    bases = tuple(launch(base, 0.01, claims.get("base_stage", Stage.DDP)) for _ in logs)
    heads = tuple(launch(head, 0.01 * math.exp(d), claims.get("head_stage", Stage.GRADIENT)) for d in logs)
    return Cell(bases[0].run, heads[0].run, bases, heads)


def finding(of: Cell, backend: str = "gloo") -> Finding:
    return judge_cells([of], backend)[0]


def test_a_launch_counts_once_by_its_slowest_rank() -> None:
    uneven = record("timed", change=lambda s: replace(s, times_s=(0.1 * (s.rank + 1), 0.5, 0.3)))
    assert step_times([uneven]) == (median([0.4, 0.5, 0.3]),)


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.1, Status.FAIL), (1.0, Status.PASS), (1 / 1.1, Status.PASS), (1.03, Status.INCONCLUSIVE)]
)
def test_one_implementation_on_both_sides_is_a_regression_test(ratio: float, status: Status) -> None:
    found = finding(cell("zero2", "zero2", ratio))
    assert (found.check, found.level, found.status) == ("time.regression", Level.MUST, status)


@pytest.mark.parametrize(
    ("stage", "backend", "bound"),
    [
        (Stage.OPTIMIZER, "gloo", 1.5),  # a reduce-scatter sent as an all-reduce, and an all-gather: 3 passes beside 2
        (Stage.GRADIENT, "gloo", 1.5),
        (Stage.PARAMETER, "gloo", 2.0),  # and one all-gather more
        (Stage.GRADIENT, "nccl", 1.0),
        (Stage.PARAMETER, "nccl", 1.5),
        (Stage.DDP, "gloo", 1.0),
    ],
)
def test_the_bound_is_what_the_stage_puts_on_the_wire(stage: Stage, backend: str, bound: float) -> None:
    found = finding(cell("ddp", "mine", 1.0, head_stage=stage), backend)
    assert (found.check, found.level) == ("time.relative", Level.SHOULD)
    assert dict(found.metrics)["bound"] == bound


@pytest.mark.parametrize(("ratio", "status"), [(1.2, Status.PASS), (1.7, Status.FAIL), (1.5, Status.INCONCLUSIVE)])
def test_slower_than_ddp_by_no_more_than_the_wire(ratio: float, status: Status) -> None:
    assert finding(cell("ddp", "mine", ratio)).status is status


def test_where_the_wire_explains_nothing_slower_is_a_failure() -> None:
    assert finding(cell("ddp", "mine", 1.05), "nccl").status is Status.FAIL
    assert finding(cell("ddp", "mine", 1.05, head_stage=Stage.DDP)).status is Status.FAIL


def test_bytes_count_in_the_dtypes_on_the_wire() -> None:
    half = Recipe("fp32", "fp32", None, "fp32", reduce="bf16", gather="bf16")
    whole = launch("mine", 0.01)
    assert wire_nbytes(replace(whole, claims=Claims(Stage.GRADIENT, half)), "nccl") * 2 == wire_nbytes(whole, "nccl")


def test_the_bound_holds_for_all_suspected_cells_together() -> None:
    """Seven of the 55 averages of the ten fresh pairs lie below the bound. A tail of ALPHA would leave out seven and
    call it exceeded; ALPHA / 2, the share of each of two suspected cells, leaves out five."""
    fresh = (0.286, *(0.47 + 0.01 * i for i in range(9)))
    assert sum((a + b) / 2 < math.log(1.5) for i, a in enumerate(fresh) for b in fresh[i:]) == 7
    heads = tuple(launch("mine", 0.01 * math.exp(d)) for d in (0.5, 0.51, 0.52, 0.53, 0.54, *fresh))
    bases = tuple(launch("ddp", 0.01, Stage.DDP) for _ in heads)
    cells = []
    for model in ("gpt-tiny", "mlp-tiny"):
        runs = [replace(side[0].run, case=replace(side[0].run.case, model=model)) for side in (bases, heads)]
        cells.append(Cell(runs[0], runs[1], bases, heads))
    found = judge_cells(cells, "gloo")
    assert [f.status for f in found] == [Status.INCONCLUSIVE] * 2
    assert all(dict(f.metrics)["low"] > 1.5 for f in found)


def test_a_launch_that_gave_no_time_speaks_for_its_cell_alone() -> None:
    good = cell("zero2", "zero2", 1.0, pairs=5)
    for status, check, word in (
        ("error", "runtime.completes", Status.FAIL),
        ("skip", "time.relative", Status.SKIP),
        ("invalid", "time.relative", Status.INVALID),
    ):
        broken = launch("mine", 0.01, status=status, reason="because")
        bad = Cell(launch("ddp", 0.01).run, broken.run, (launch("ddp", 0.01),), (broken,))
        first, second = judge_cells([bad, good], "gloo")
        assert (first.check, first.status, second.status) == (check, word, Status.PASS)
        assert "because" in first.actual


def test_too_few_pairs_are_inconclusive() -> None:
    found = finding(cell("zero2", "zero2", 2.0, pairs=6))
    assert found.status is Status.INCONCLUSIVE
    assert "fewer pairs" in found.detail[0]


def test_cells_take_their_launches_by_run() -> None:
    ours, theirs = launch("mine", 0.01), launch("ddp", 0.01)
    other = replace(ours, run=replace(ours.run, case=replace(ours.run.case, model="mlp-tiny")))
    (found,) = cells_of({"base": [theirs], "head": [other, ours]}, [(theirs.run, ours.run)])
    assert (found.base_launches, found.head_launches) == ((theirs,), (ours,))
