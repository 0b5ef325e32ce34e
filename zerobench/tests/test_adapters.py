"""Adapters of torch's sharded data parallelism: exact on the dyadic model, honest about bytes, names and traffic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from zerobench import models
from zerobench.analytic import evaluate_volume, sent_numel
from zerobench.claims import Claims
from zerobench.implementations.answers import claimed
from zerobench.implementations.colossalai_zero import ColossalAi2
from zerobench.implementations.deepspeed_zero import DeepSpeed1, DeepSpeed2, DeepSpeed3
from zerobench.implementations.fairscale_fsdp import FairscaleFsdp
from zerobench.implementations.fsdp1 import Fsdp1Full, Fsdp1GradOp, Fsdp1Hybrid
from zerobench.implementations.fsdp2 import Fsdp2, Fsdp2NoReshard, Fsdp2RootDefault, Hsdp2
from zerobench.implementations.megatron_fsdp import MegatronFsdp2
from zerobench.implementations.protocol import Job, Unsupported, World
from zerobench.implementations.registry import BadPlugin, check_engine
from zerobench.implementations.simple_fsdp import SimpleFsdp
from zerobench.implementations.torch_ddp import TorchDdp, TorchDdpNoViews
from zerobench.implementations.torch_sharded import root_gathered_once
from zerobench.implementations.torch_zero import TorchZero
from zerobench.scenarios import ADAMW, SGD
from zerobench.terms import Category, Stage
from zerobench.tests.ranks import join, run_ranks
from zerobench.tests.test_reference import GROUPS, assert_same, fp64_history, job_of, train

ROWS = [  # model, A, precision, optimizer, features
    ("dyadic", 1, "fp32", SGD, ()),
    ("dyadic", 2, "bf16", GROUPS, ()),
    ("dyadic", 2, "fp16", SGD, ()),
    ("dyadic-frozen", 2, "bf16", SGD, ()),
    ("dyadic-unused", 1, "fp32", SGD, ("unused",)),
]
FLAT = (TorchDdpNoViews, TorchZero, Fsdp1Full, Fsdp1GradOp, Fsdp2, Fsdp2NoReshard, Fsdp2RootDefault)
HYBRID = (Fsdp1Hybrid, Hsdp2)


@pytest.mark.parametrize(
    ("subject", "options", "on_cpu", "on_gpu"),
    [
        (TorchDdp, {}, True, True),
        (Fsdp1Full, {}, False, True),
        (Fsdp2, {}, False, True),
        (SimpleFsdp, {}, False, True),
        (FairscaleFsdp, {}, False, True),
        (MegatronFsdp2, {}, False, True),
        (ColossalAi2, {}, False, True),
        (DeepSpeed1, {"overlap": True}, False, False),  # overlap_comm is of stages 2 and 3
        (DeepSpeed2, {}, False, False),  # off unless it is asked for
        (DeepSpeed2, {"overlap": True}, False, True),
        (DeepSpeed3, {}, False, True),
        (DeepSpeed3, {"overlap": False}, False, False),
    ],
)
def test_what_overlaps_by_streams_claims_it_where_there_are_any(
    subject: Any, options: dict[str, object], on_cpu: bool, on_gpu: bool
) -> None:
    for device, backend, claims in (("cpu", "gloo", on_cpu), ("cuda", "nccl", on_gpu)):
        model = models.build("dyadic", world_size=2, micro_batches=1, device="cpu")
        world = World(0, 2, torch.device(device), backend)
        job = Job(model.module, model.units, world, "fp32", ADAMW, options=options)
        assert ("overlap" in subject().claims(job).supports) == claims, device


def _dyadic(rank: int, n: int, store: str, subject: Any) -> None:
    join(rank, n, store)
    for name, a, precision, optimizer, features in ROWS:
        expected = fp64_history(name, n, a, 3, optimizer)
        changes: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "features": frozenset(features)}
        engine, actual = train(subject(), name, rank, n, steps=3, a=a, **changes)
        for step, (_, _, parameters) in enumerate(actual):
            assert_same(parameters, expected[step], (name, n, a, precision, step))
            assert all(p.dtype == torch.float32 for p in parameters.values())  # the most precise copy there is
        engine.close()


@pytest.mark.parametrize(("subject", "n"), [*((s, 2) for s in FLAT), (TorchZero, 3), (Fsdp1Full, 3), (Fsdp2, 3)])
def test_dyadic_is_bit_for_bit_fp64(subject: Any, n: int) -> None:
    run_ranks(_dyadic, n, subject)


@pytest.mark.parametrize("subject", HYBRID)
def test_hybrids_too_at_four_ranks(subject: Any) -> None:
    run_ranks(_dyadic, 4, subject)


def _adam(rank: int, n: int, store: str, subject: Any) -> tuple[dict[Category, int], dict[str, Any]]:
    """Bytes that this rank claims after a third backward, and all optimizer states, whole, under the module's names."""
    join(rank, n, store)
    model = models.build("gpt-tiny", world_size=n, micro_batches=1)
    shapes = {name: p.shape for name, p in model.module.named_parameters()}
    job = job_of(model, rank, n, optimizer=ADAMW, bucket_numel=5000)
    implementation = subject()
    claims = implementation.claims(job)
    claimed(claims)
    engine = implementation.build(job)
    check_engine(engine, claims)
    for step in range(3):
        engine.backward(engine.forward(model.batch(step, rank, 0), last=True), last=True)
        if step < 2:
            engine.step()
    held = engine.model_states()
    assert {name: p.shape for name, p in engine.full_parameters().items()} == shapes
    assert {name: g.shape for name, g in engine.full_gradients().items()} == shapes
    states = engine.full_optimizer_state()
    assert {name: s["exp_avg"].shape for name, s in states.items()} == shapes
    values = {name: {k: v.tolist() for k, v in state.items()} for name, state in states.items()}
    engine.close()
    return {c: sum(t.numel() * t.itemsize for t in ts if t.numel() > 1) for c, ts in held.items()}, values


@pytest.mark.parametrize("subject", [TorchZero, Fsdp1Full, Fsdp2])
def test_states_are_whole_and_ddps_and_bytes_are_the_stages(subject: Any) -> None:
    n = 2
    psi = sum(p.numel() for p in models.build("gpt-tiny", world_size=n, micro_batches=1).module.parameters())
    _, right = run_ranks(_adam, n, TorchDdp)[0]
    found = run_ranks(_adam, n, subject)
    for _, states in found:
        assert states == right  # n A = 2 in fp32: the same bits
    shards = {c: subject().claims(_job(n)).stage.shards(c) for c in (Category.PARAMETER, Category.GRADIENT)}
    pad = n * subject().claims(_job(n)).padding_numel
    for category, cost in ((Category.PARAMETER, 4), (Category.GRADIENT, 4), (Category.OPTIMIZER, 8)):
        whole = cost * psi * (1 if shards.get(category, True) else n)
        assert whole <= sum(held[category] for held, _ in found) <= whole + cost * pad, category


def _job(n: int) -> Any:
    return job_of(models.build("gpt-tiny", world_size=n, micro_batches=1), 0, n)


@pytest.mark.parametrize("subject", HYBRID)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_hybrids_refuse_a_world_that_has_no_two_groups(subject: Any, n: int) -> None:
    with pytest.raises(Unsupported, match="even n"):
        subject().claims(_job(n))


def test_a_root_in_no_unit_is_gathered_once() -> None:
    job = _job(4)
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in job.units]
    psi = sum(p.numel() for p in job.module.parameters())
    assert evaluate_volume(root_gathered_once(job), 2) == 2 * (2 + Fraction(sum(sizes), psi))


def test_a_hybrid_claims_what_the_formulas_say() -> None:
    """Where everything is in a unit, the hybrid's volume is that of stage 3 with groups of n / 2."""
    job = job_of(models.build("stack-4", world_size=4, micro_batches=1), 0, 4)
    psi = sum(p.numel() for p in job.module.parameters())
    root = psi - sum(p.numel() for unit in job.units for p in unit.parameters())
    sent = sum(sent_numel(Stage.PARAMETER, psi, 4, 1, shard_size=2).values(), Fraction(0))
    spared = root * Fraction(1, 2)  # one pass of the root's weights in a group of 2
    assert evaluate_volume(root_gathered_once(job, 2), 1) * psi * Fraction(3, 4) == sent - spared


def _mutated(rank: int, n: int, store: str) -> None:
    join(rank, n, store)
    engine = TorchZero().build(job_of(models.build("dyadic", world_size=n, micro_batches=1), rank, n))
    engine.full_gradients = None  # type: ignore[assignment, method-assign]
    with pytest.raises(BadPlugin, match="full_gradients"):
        check_engine(engine, Claims(Stage.OPTIMIZER, supports=TorchZero.supports))


def test_an_adapter_that_lost_what_it_claims_is_refused() -> None:
    run_ranks(_mutated, 1)
