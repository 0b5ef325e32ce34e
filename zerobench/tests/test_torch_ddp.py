"""The torch DDP adapter: right on the dyadic model, and it claims the bytes that DDP holds."""

from __future__ import annotations

from typing import Any

import pytest

from zerobench import models
from zerobench.implementations.torch_ddp import TorchDdp
from zerobench.probes.traffic import Tap
from zerobench.scenarios import ADAMW, SGD
from zerobench.terms import Category, Collective
from zerobench.tests.ranks import join, run_ranks
from zerobench.tests.test_reference import GROUPS, assert_same, fp64_history, job_of, train

ROWS = [  # model, A, precision, optimizer, features
    ("dyadic", 1, "fp32", SGD, ()),
    ("dyadic", 2, "bf16", SGD, ()),
    ("dyadic", 2, "fp16", GROUPS, ()),
    ("dyadic-tied", 2, "fp32", SGD, ()),
    ("dyadic-frozen", 2, "bf16", SGD, ()),
    ("dyadic-unused", 2, "fp32", SGD, ("unused",)),
]


def _dyadic(rank: int, n: int, store: str) -> None:
    join(rank, n, store)
    for name, a, precision, optimizer, features in ROWS:
        expected = fp64_history(name, n, a, 3, optimizer)
        changes: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "features": frozenset(features)}
        engine, actual = train(TorchDdp(), name, rank, n, steps=3, a=a, bucket_numel=60, **changes)
        for step, (_, _, parameters) in enumerate(actual):
            assert_same(parameters, expected[step], (name, n, a, precision, step))
        engine.close()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_dyadic_is_bit_for_bit_fp64(n: int) -> None:
    run_ranks(_dyadic, n)


def _bytes(rank: int, n: int, store: str) -> list[tuple[dict[Category, int], int]]:
    """Claimed bytes by category, and the bytes of the storages that hold the claimed gradients, after each moment."""
    join(rank, n, store)
    model = models.build("mlp-tiny", world_size=n, micro_batches=1)
    engine = TorchDdp().build(job_of(model, rank, n, "bf16", optimizer=ADAMW, bucket_numel=5000))
    seen = []

    def look() -> None:
        states = engine.model_states()
        held = {c: sum(t.numel() * t.itemsize for t in ts if t.numel() > 1) for c, ts in states.items()}
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in states[Category.GRADIENT]}
        seen.append((held, sum(storages.values())))

    for step in range(3):
        engine.backward(engine.forward(model.batch(step, rank, 0), last=True), last=True)
        look()
        engine.step()
        look()
    assert all(p.grad is None for p in model.module.parameters())
    engine.close()
    return seen


def test_claims_the_buckets_that_zero_grad_does_not_free() -> None:
    psi = sum(p.numel() for p in models.build("mlp-tiny", world_size=2, micro_batches=1).module.parameters())
    for seen in run_ranks(_bytes, 2):
        first, *rest = seen
        assert first[0][Category.OPTIMIZER] == 0  # Adam's moments exist from the first step
        for held, storages in rest:
            assert held == {Category.PARAMETER: 4 * psi, Category.GRADIENT: 4 * psi, Category.OPTIMIZER: 8 * psi}
            assert storages == 4 * psi  # the claimed views show whole buckets, and no bucket twice


def _calls(rank: int, n: int, store: str) -> int:
    """Elements that backward passes of one step with A = 3 all-reduce, after the buckets are rebuilt."""
    join(rank, n, store)
    model = models.build("mlp-tiny", world_size=n, micro_batches=3)
    engine = TorchDdp().build(job_of(model, rank, n))
    tap = Tap()
    for step in range(3):
        if step == 2:
            tap.install()
        for micro in range(3):
            engine.backward(engine.forward(model.batch(step, rank, micro), last=micro == 2), last=micro == 2)
        engine.step()
    tap.uninstall()
    assert {call.kind for call in tap.calls} == {Collective.ALL_REDUCE}
    engine.close()
    return sum(call.numel for call in tap.calls)


@pytest.mark.parametrize("n", [1, 2])
def test_reduces_once_a_step_also_with_one_rank(n: int) -> None:
    psi = sum(p.numel() for p in models.build("mlp-tiny", world_size=n, micro_batches=3).module.parameters())
    assert run_ranks(_calls, n) == [psi] * n
