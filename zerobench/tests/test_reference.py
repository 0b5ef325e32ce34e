"""The reference on real gloo ranks: bit for bit DDP, bit for bit fp64 on the dyadic model, byte for byte the recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zerobench import models
from zerobench.claims import OptimizerSpec, ParamGroup, Recipe
from zerobench.implementations.buckets import Bucket, allocated, plan
from zerobench.implementations.protocol import Job, World
from zerobench.implementations.reference import Ddp, Reference, Zero, Zero1, Zero2, Zero3
from zerobench.implementations.torch_ddp import TorchDdp
from zerobench.oracle import Oracle
from zerobench.scenarios import ADAMW, SGD
from zerobench.terms import DTYPE_NBYTES, Category
from zerobench.tests.ranks import join, run_ranks

STAGES: tuple[type[Reference], ...] = (Ddp, Zero1, Zero2, Zero3)


def job_of(model: models.Model, rank: int, n: int, precision: str = "fp32", **changes: Any) -> Job:
    world = World(rank, n, torch.device("cpu"), "gloo")
    job = Job(model.module, model.units, world, precision, SGD, micro_batches=model.micro_batches)
    return replace(job, **changes)


def train(
    implementation: Any, name: str, rank: int, n: int, *, steps: int, a: int = 1, **changes: Any
) -> tuple[Any, list]:
    """The engine after `steps` steps, and each step's (losses, gradients, parameters)."""
    model = models.build(name, world_size=n, micro_batches=a)
    engine = implementation.build(job_of(model, rank, n, **changes))
    history = []
    for step in range(steps):
        losses = []
        for micro in range(a):
            loss = engine.forward(model.batch(step, rank, micro), last=micro == a - 1)
            engine.backward(loss, last=micro == a - 1)
            losses.append(loss.detach())
        gradients = copies(engine.full_gradients())
        engine.step()
        history.append((losses, gradients, copies(engine.full_parameters())))
    return engine, history


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    assert list(actual) == list(expected), what
    for name, value in actual.items():
        assert value.shape == expected[name].shape, (what, name)
        assert torch.equal(value.double(), expected[name].double()), (what, name)


def assert_same_history(actual: list, expected: list, what: object) -> None:
    for step, ((l1, g1, p1), (l2, g2, p2)) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(torch.stack(l1), torch.stack(l2)), (what, step, "loss")
        assert_same(g1, g2, (what, step, "gradient"))
        assert_same(p1, p2, (what, step, "parameter"))


# -- against torch's DDP -----------------------------------------------------------------------------------------------


def _like_ddp(rank: int, n: int, store: str) -> None:
    join(rank, n, store)
    for name in ("mlp-tiny", "gpt-tiny"):
        for optimizer in (SGD, ADAMW):
            # Small buckets, so that parameters are cut and units have several.
            changes: dict[str, Any] = {"optimizer": optimizer, "bucket_numel": 3000, "steps": 5}
            other, expected = train(TorchDdp(), name, rank, n, **changes)
            for stage in STAGES:
                engine, actual = train(stage(), name, rank, n, **changes)
                what = (stage.name, name, optimizer.kind)
                assert_same_history(actual, expected, what)
                states = engine.full_optimizer_state()
                for parameter, state in other.full_optimizer_state().items():
                    assert_same(dict(sorted(states[parameter].items())), dict(sorted(state.items())), (what, parameter))
                engine.close()
            other.close()


def test_every_stage_is_bit_for_bit_torch_ddp_at_two_ranks() -> None:
    run_ranks(_like_ddp, 2)


# -- against fp64 on the dyadic model ----------------------------------------------------------------------------------


def fp64_history(name: str, n: int, a: int, steps: int, optimizer: OptimizerSpec) -> list[dict[str, torch.Tensor]]:
    """Parameters after each step of one process in fp64 over all n*A micro-batches."""
    model = models.build(name, world_size=n, micro_batches=a)
    module = model.module.double()
    named = dict(module.named_parameters())
    job = replace(job_of(model, 0, n), optimizer=optimizer)
    sgd = optimizer.torch()(job.param_groups(), **optimizer.options())
    history = []
    for step in range(steps):
        for micro in range(a):
            for rank in range(n):
                (module(*model.batch(step, rank, micro)) / (n * a)).backward()
        sgd.step()
        sgd.zero_grad()
        history.append(copies(named))
    return history


GROUPS = replace(
    SGD, groups=(ParamGroup(("first.shift", "second.weight"), {"lr": 0.125}), ParamGroup(("level",), {"lr": 0.5}))
)


DYADIC_ROWS: list[tuple[str, int, str, OptimizerSpec, int | None]] = [  # model, A, precision, optimizer, bucket
    ("dyadic", 1, "fp32", SGD, None),
    ("dyadic", 1, "bf16", GROUPS, 60),
    ("dyadic", 2, "bf16", SGD, 27),
    ("dyadic", 2, "fp16", SGD, None),
    ("dyadic-tied", 2, "bf16", SGD, 60),
    ("dyadic-frozen", 1, "fp32", SGD, 60),
    ("dyadic-unused", 2, "bf16", SGD, 60),
]


def _dyadic(rank: int, n: int, store: str) -> None:
    join(rank, n, store)
    for name, a, precision, optimizer, bucket in DYADIC_ROWS if n < 4 else DYADIC_ROWS[1:3]:
        expected = fp64_history(name, n, a, 3, optimizer)
        for stage in STAGES:
            changes: dict[str, Any] = {"precision": precision, "bucket_numel": bucket, "optimizer": optimizer}
            engine, actual = train(stage(), name, rank, n, steps=3, a=a, **changes)
            for step, (_, _, parameters) in enumerate(actual):
                assert_same(parameters, expected[step], (stage.name, name, n, a, precision, bucket, step))
            engine.close()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_dyadic_is_bit_for_bit_fp64(n: int) -> None:
    run_ranks(_dyadic, n)


# -- bytes -------------------------------------------------------------------------------------------------------------


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.itemsize for t in tensors if t.numel() > 1)


def _bytes(rank: int, n: int, store: str) -> list[Any]:
    """For each row: what the rank claims by category at BACKWARD of the second step, less what is alive of it."""
    join(rank, n, store)
    rows = []
    for precision in ("fp32", "bf16"):
        for optimizer in (ADAMW, SGD):
            for stage in STAGES:
                model = models.build("mlp-tiny", world_size=n, micro_batches=1)
                job = job_of(model, rank, n, precision, optimizer=optimizer, bucket_numel=5000)
                padding = stage().claims(job).padding_numel
                engine = stage().build(job)
                for step in range(2):
                    engine.backward(engine.forward(model.batch(step, rank, 0), last=True), last=True)
                    if step == 0:
                        engine.step()
                held = {c.value: nbytes(ts) for c, ts in engine.model_states().items()}
                storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in all_tensors(engine)}
                rows.append((held, sum(s.nbytes() for s in storages.values() if s.nbytes() > 4), padding))
                engine.close()
    return rows


def all_tensors(engine: Zero) -> list[torch.Tensor]:
    """Every tensor that the engine can reach, claimed or not."""
    tensors = [t for b in engine.buckets for t in vars(b).values() if isinstance(t, torch.Tensor)]
    tensors += [t for p in engine.module.parameters() for t in (p, p.grad) if t is not None]
    tensors += [v for state in engine.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    tensors += [p for group in engine.optimizer.param_groups for p in group["params"]]
    return tensors


@pytest.mark.parametrize("n", [1, 3])
def test_bytes_are_the_recipe(n: int) -> None:
    """Psi (w + g + K), each sharded category divided by n: the ranks' sum exactly, with each bucket's padding."""
    answers = run_ranks(_bytes, n)
    model = models.build("mlp-tiny", world_size=n, micro_batches=1)
    rows = iter(zip(*answers, strict=True))
    for precision in ("fp32", "bf16"):
        recipe = Recipe.of(precision)
        w, g = DTYPE_NBYTES[recipe.parameter], DTYPE_NBYTES[recipe.gradient]
        master = DTYPE_NBYTES[recipe.master] if recipe.master else 0
        for optimizer in (ADAMW, SGD):
            for stage in STAGES:
                layouts = plan(job_of(model, 0, n, bucket_numel=5000), stage.stage)
                psi, padded = sum(ly.slots[-1].stop for ly in layouts), sum(ly.padded for ly in layouts)
                shares = {c: n if stage.stage.shards(c) else 1 for c in Category}
                moments = DTYPE_NBYTES[recipe.moments] * optimizer.moments
                expected = {  # summed over the ranks
                    "parameter": w * padded * n // shares[Category.PARAMETER],
                    "gradient": g * padded * n // shares[Category.GRADIENT],
                    "optimizer": (master * padded + moments * psi) * n // shares[Category.OPTIMIZER],
                }
                ranks = next(rows)
                what = (stage.name, precision, optimizer.kind)
                assert {k: sum(held[k] for held, _, _ in ranks) for k in expected} == expected, what
                for held, alive, padding in ranks:
                    assert alive == sum(held.values()), what  # nothing unsharded, nothing unclaimed
                    for category, each in (("parameter", w), ("gradient", g)):
                        most = each * (-(-psi // shares[Category(category)]) + padding)
                        assert held[category] <= most, what


def _peaks(rank: int, n: int, store: str) -> dict[str, list[int]]:
    """Whole gradients and whole weights alive as the gradient passes each boundary."""
    join(rank, n, store)
    model = models.build("stack-8", world_size=n, micro_batches=2)
    engine = Zero3().build(job_of(model, rank, n, "bf16", bucket_numel=4160))
    alive: dict[str, list[int]] = {"gradient": [], "weight": []}
    model.observe(lambda name: [alive[k].append(sum(allocated(getattr(b, k)) for b in engine.buckets)) for k in alive])
    for micro in range(2):
        engine.backward(engine.forward(model.batch(0, rank, micro), last=micro == 1), last=micro == 1)
    engine.step()
    with torch.no_grad():
        engine.forward(model.batch(1, rank, 0), last=True)
    assert not any(allocated(b.weight) or allocated(b.gradient) for b in engine.buckets)
    return alive


def test_stage_3_holds_two_gradient_buckets_and_no_weight_between_units() -> None:
    for alive in run_ranks(_peaks, 2):
        assert len(alive["gradient"]) == 16
        assert max(alive["gradient"]) <= 2 and max(alive["weight"]) == 0


# -- collectives -------------------------------------------------------------------------------------------------------


def _no_group(rank: int, n: int, store: str) -> None:
    """One rank without a process group: a collective would raise."""
    for stage in STAGES:
        engine, _ = train(stage(), "gpt-tiny", rank, n, steps=2, a=2, precision="bf16", optimizer=ADAMW)
        engine.full_optimizer_state()
        engine.close()


def test_one_rank_needs_no_process_group() -> None:
    run_ranks(_no_group, 1)


def _volume(rank: int, n: int, store: str) -> dict[str, int]:
    """Elements of whole tensors that one step's collectives carry, an all-reduce twice, by stage."""
    join(rank, n, store)
    from zerobench.implementations import reference, states

    sent = [0]

    def counting(real: Any, passes: int) -> Any:
        def call(first: torch.Tensor, *rest: Any) -> Any:
            sent[0] += passes * max(t.numel() for t in (first, *rest) if isinstance(t, torch.Tensor))
            return real(first, *rest)

        return call

    reference.all_reduce = counting(reference.all_reduce, 2)
    reference.reduce_scatter = counting(reference.reduce_scatter, 1)
    reference.all_gather = states.all_gather = counting(reference.all_gather, 1)
    volumes = {}
    for stage in STAGES:
        model = models.build("gpt-tiny", world_size=n, micro_batches=3)
        engine = stage().build(job_of(model, rank, n))
        sent[0] = 0
        for micro in range(3):
            engine.backward(engine.forward(model.batch(0, rank, micro), last=micro == 2), last=micro == 2)
        engine.step()
        volumes[stage.name] = sent[0]
    return volumes


def test_volume_is_the_papers() -> None:
    """2 Psi, 2 Psi, (A + 1) Psi and 3 A Psi elements at A = 3; gpt-tiny's buckets need no padding at n = 2."""
    psi = sum(p.numel() for p in models.build("gpt-tiny", world_size=2, micro_batches=3).module.parameters())
    for volumes in run_ranks(_volume, 2):
        assert volumes == {"ddp": 2 * psi, "zero1": 2 * psi, "zero2": 4 * psi, "zero3": 9 * psi}


# -- mixed precision, accumulation -------------------------------------------------------------------------------------


def _mixed(rank: int, n: int, store: str) -> None:
    """bf16 against the oracle's Adam, which sums the two terms in fp64; both go on from fp32 masters."""
    join(rank, n, store)
    for stage in STAGES:
        engine, history = train(stage(), "gpt-tiny", rank, n, steps=3, precision="bf16", optimizer=ADAMW)
        model = models.build("gpt-tiny", world_size=n, micro_batches=1)
        oracle = Oracle(model.module, ADAMW, dtype=torch.bfloat16)
        for step, (_, gradients, parameters) in enumerate(history):
            right = oracle.gradients([model.batch(step, r, 0) for r in range(n)])
            bound = right.bound(reduce=torch.bfloat16, gradient=torch.bfloat16)
            for name, gradient in gradients.items():
                assert ((gradient.double() - right.mean[name]).abs() <= bound[name]).all(), (stage.name, step, name)
            oracle.step({name: g.float() for name, g in gradients.items()})
            assert_same(parameters, oracle.masters, (stage.name, step))
        engine.close()


def test_bf16_steps_are_torch_optim_on_fp32_masters() -> None:
    run_ranks(_mixed, 2)


# -- layout, refusals --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    n=st.integers(1, 9),
    limit=st.integers(1, 60),
    stage=st.sampled_from(STAGES),
)
def test_plan_holds_every_element_once_and_parts_are_equal(sizes: list[int], n: int, limit: int, stage: Any) -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    original = {name: p.detach().clone() for name, p in module.named_parameters()}
    world = World(0, n, torch.device("cpu"), "gloo")
    job = Job(module, (), world, "bf16", SGD, bucket_numel=limit)
    layouts = plan(job, stage.stage)
    assert [s.name for ly in layouts for s in ly.slots] == list(reversed(original))
    for layout in layouts:
        assert layout.slots[-1].stop <= limit or len(layout.slots) == 1
        assert layout.padding < n and (layout.padded % n == 0 or stage is Ddp)
        masters, covered = [], 0
        group_of = {id(s.parameter): i % 2 for i, s in enumerate(layout.slots)}
        for rank in range(n):
            for slot in layout.slots:
                slot.parameter.data = original[slot.name].clone()
            bucket = Bucket(layout, replace(world, rank=rank), torch.bfloat16, stage.stage)
            masters.append(bucket.master)
            covered += sum(where.stop - where.start for _, where in bucket.runs(group_of))
        whole = torch.cat(masters) if stage is not Ddp else masters[0]
        assert all(torch.equal(slot.of(whole), original[slot.name]) for slot in layout.slots)
        assert covered == layout.slots[-1].stop * (n if stage is Ddp else 1)  # padding is in no run


def test_shared_parameters_belong_to_the_rest() -> None:
    model = models.build("dyadic-tied", world_size=2, micro_batches=1)
    homes = {s.name: layout.unit for layout in plan(job_of(model, 0, 2), Zero3.stage) for s in layout.slots}
    assert homes["first.shift"] is model.module and homes["first.weight"] is model.units[0]
    assert "second.shift" not in homes


def test_a_step_without_a_closed_backward_is_refused() -> None:
    model = models.build("dyadic", world_size=1, micro_batches=2)
    engine = Zero1().build(job_of(model, 0, 1))
    engine.backward(engine.forward(model.batch(0, 0, 0), last=False), last=False)
    with pytest.raises(RuntimeError, match="last=True"):
        engine.step()
