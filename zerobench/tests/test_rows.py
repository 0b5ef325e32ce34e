"""The second ZeRO, which has no flat buffers: what is special about it, and that no check finds fault with it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zerobench import models
from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.finding import Status
from zerobench.implementations.protocol import Job, World
from zerobench.implementations.registry import resolve
from zerobench.judge import judge, plan
from zerobench.launch.local import Local
from zerobench.models.model import Model
from zerobench.mutants.rows import Rows, Rows0, Rows1, Rows2, Rows3
from zerobench.mutants.rows_engine import RowsEngine, parameters_of
from zerobench.mutants.rows_parameter import partition
from zerobench.mutants.rows_unit import tensors
from zerobench.mutants.table_rows import ROWS
from zerobench.scenarios import ADAMW

STAGES = (Rows0, Rows1, Rows2, Rows3)


def alone(implementation: Rows, model: Model, **changes: Any) -> RowsEngine:
    """An engine for one rank, which needs no process group."""
    world = World(0, 1, torch.device("cpu"), "gloo")
    job = Job(model.module, model.units, world, "fp32", ADAMW)
    return implementation.build(replace(job, **changes))


def whole(row: Any) -> bool:
    return bool(row.parameter.untyped_storage().size())


@pytest.mark.parametrize(
    ("numel", "n", "lengths"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0]), (5, 1, [5])]
)
def test_partition_is_even_but_for_one_element_and_never_pads(numel: int, n: int, lengths: list[int]) -> None:
    assert partition(numel, n) == lengths


def test_the_claim_is_the_first_ranks_odd_elements() -> None:
    """dyadic: 106, 5, 98, 5 and 1 elements. Rank 0 of 3 has 36 + 2 + 33 + 2 + 1 = 74 of 215, a third is 71.67."""
    model = models.build("dyadic", world_size=3, micro_batches=1)
    job = Job(model.module, model.units, World(0, 3, torch.device("cpu"), "gloo"), "fp32", ADAMW)
    assert [kind().claims(job).padding_numel for kind in STAGES] == [0, 3, 3, 3]


@pytest.mark.parametrize("kind", STAGES)
def test_one_rank_trains_as_torch_does(kind: type[Rows]) -> None:
    model, plain = (models.build("mlp-tiny", world_size=1, micro_batches=1) for _ in range(2))
    engine = alone(kind(), model)
    optimizer = torch.optim.AdamW(plain.module.parameters(), **ADAMW.options())
    for step in range(2):
        batch = model.batch(step, 0, 0)
        engine.backward(engine.forward(batch, last=True), last=True)
        engine.step()
        plain.module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.module.named_parameters():
        assert torch.equal(engine.full_parameters()[name], parameter), name
    engine.close()


def test_stage_three_has_whole_weights_only_where_they_are_used() -> None:
    model = models.build("mlp-tiny", world_size=1, micro_batches=1)
    engine = alone(Rows3(), model)
    seen: list[tuple[str, set[str]]] = []
    model.observe(lambda name: seen.append((name, {row.name for row in engine.rows if whole(row)})))
    with torch.no_grad():
        engine.forward(model.batch(0, 0, 0), last=True)
    assert not any(whole(row) for row in engine.rows)
    loss = engine.forward(model.batch(0, 0, 0), last=True)
    assert not any(whole(row) for row in engine.rows)
    engine.backward(loss, last=True)
    assert not any(whole(row) for row in engine.rows)
    # As a gradient is about to enter a block, the weights of those above are gone, and its own are not yet there.
    assert seen == [("block 2", set()), ("block 1", set()), ("block 0", set())]


def test_a_frozen_unit_is_freed_when_its_inputs_have_their_gradient() -> None:
    model = models.build("mlp-tiny", world_size=1, micro_batches=1)
    model.units[1].requires_grad_(False)
    engine = alone(Rows3(), model)
    seen: dict[str, bool] = {}
    frozen = [row for row in engine.rows if not row.trainable]
    model.observe(lambda name: seen.update({name: any(whole(row) for row in frozen)}))
    engine.backward(engine.forward(model.batch(0, 0, 0), last=True), last=True)
    assert len(frozen) == 2
    assert seen == {"block 2": False, "block 1": False, "block 0": False}
    assert all(row.gradient is None for row in frozen)


class Late(nn.Module):
    """The second weight's use is hidden from the loss's graph: a hook differentiates it apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.shown
        y.register_hook(self._apart)
        return y.sum()

    @torch.enable_grad()
    def _apart(self, _: Tensor) -> None:
        self.hidden.sum().backward()


def test_a_gradient_after_its_reduction_is_an_error() -> None:
    world = World(0, 1, torch.device("cpu"), "gloo")
    engine = Rows2().build(Job(Late(), (), world, "fp32", ADAMW, features=frozenset({"unused"})))
    with pytest.raises(RuntimeError, match="hidden got a gradient after it was reduced"):
        engine.backward(engine.forward((torch.ones(2),), last=True), last=True)


def test_helpers_find_what_is_nested_and_what_is_used() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    assert parameters_of((a * 2).sum()) == {id(a)}
    found: Iterator[Tensor] = tensors([a, (1, {"x": b}), "text"])
    assert [id(x) for x in found] == [id(a), id(b)]


KEPT = (
    "memory.at_rest",
    "memory.gradient_peak",
    "memory.parameter_peak",
    "traffic.volume",
    "traffic.kinds",
    "traffic.overlap",
    "numerics.gradient",
    "numerics.update",
    "numerics.unused",
    "state.reshard",
)


@pytest.mark.timeout(240)
def test_no_check_cries_wolf() -> None:
    """Every stage on real ranks, on three where nothing divides. The self-test and conform have the whole catalogue."""
    cases = [
        Case(kind.name, f"zerobench.mutants.rows:{kind.__name__}", "mlp-tiny", n, precision)
        for kind, n, precision in ((Rows0, 2, "bf16"), (Rows1, 3, "bf16"), (Rows2, 3, "bf16"), (Rows3, 3, "fp32"))
    ]
    with Local() as local:
        runs = plan(cases, KEPT)
        records = {id: local.launch(run, deadline_s=60.0, suite="rows") for id, run in runs.items()}
    findings = judge("rows", cases, KEPT, records, by="claim").findings
    assert [(f.id, f.status, f.actual) for f in findings if f.status not in (Status.PASS, Status.SKIP)] == []
    skipped = {(f.case.split("/")[0], f.check) for f in findings if f.status is Status.SKIP}
    below_three = {(kind.name, "memory.parameter_peak") for kind in (Rows0, Rows1, Rows2)}
    assert skipped == {("rows0", "traffic.kinds"), *below_three}


@pytest.mark.parametrize("mutant", ROWS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_where_its_row_says(mutant: Any) -> None:
    assert resolve(mutant.reference).name == mutant.name
    assert set(mutant.killers) <= set(CHECKS)


def test_every_planted_class_has_a_row() -> None:
    from zerobench.mutants import planted_rows

    planted = {
        kind.name
        for _, kind in inspect.getmembers(planted_rows, inspect.isclass)
        if issubclass(kind, planted_rows.Planted) and kind is not planted_rows.Planted
    }
    assert planted == {mutant.name for mutant in ROWS}
