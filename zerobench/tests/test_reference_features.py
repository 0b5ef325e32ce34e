"""What the reference and torch's DDP do beside plain steps: clip, scale losses, save and load, evaluate, recompute.

One rank where no other is needed; else real gloo ranks, each launch of which does all stages.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zerobench import models
from zerobench.claims import OptimizerSpec
from zerobench.difference import unit_roundoff
from zerobench.implementations.buckets import allocated
from zerobench.implementations.checkpoint import BadCheckpoint
from zerobench.implementations.loss_scale import GROWTH_STEPS, LossScale
from zerobench.implementations.reference import Ddp, Zero1, Zero2, Zero3
from zerobench.implementations.torch_ddp import TorchDdp
from zerobench.probes.traffic import Tap
from zerobench.scenarios import ADAMW, SGD
from zerobench.terms import Category, Collective
from zerobench.tests.ranks import join, run_ranks
from zerobench.tests.test_reference import STAGES, assert_same, copies, fp64_history, job_of

ALL: tuple[Any, ...] = (*STAGES, TorchDdp)
PLAIN = OptimizerSpec("sgd", lr=0.25)


def built(implementation: Any, name: str, rank: int, n: int, **changes: Any) -> tuple[Any, models.Model]:
    model = models.build(name, world_size=n, micro_batches=1)
    return implementation().build(job_of(model, rank, n, **changes)), model


def backward(engine: Any, model: models.Model, step: int, rank: int, factor: float = 1.0) -> None:
    engine.backward(engine.forward(model.batch(step, rank, 0), last=True) * factor, last=True)


def everything(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of whole parameters and whole optimizer states, by name."""
    states = engine.full_optimizer_state().items()
    return copies(engine.full_parameters() | {f"{n}/{k}": v for n, state in states for k, v in sorted(state.items())})


# -- clipping ----------------------------------------------------------------------------------------------------------


def _clip(rank: int, n: int, store: str) -> list[float]:
    """The norm that each reports in each precision. Its clipped step is compared with torch's own clipping in fp64."""
    join(rank, n, store)
    norms = []
    for implementation in ALL:
        for precision, scale in (("fp32", None), ("bf16", 1024.0)):
            changes: dict[str, Any] = {"precision": precision, "loss_scale": scale, "bucket_numel": 5000}
            engine, model = built(implementation, "mlp-tiny", rank, n, clip_norm=0.01, optimizer=PLAIN, **changes)
            backward(engine, model, 0, rank)
            gradients, before = copies(engine.full_gradients()), copies(engine.full_parameters())
            report = engine.step()

            whole = [nn.Parameter(p.double()) for p in before.values()]
            for p, g in zip(whole, gradients.values(), strict=True):
                p.grad = g.double()
            norm = float(nn.utils.clip_grad_norm_(whole, 0.01))
            assert norm > 0.1 and not report.skipped
            # The reference adds squares in fp64. The adapter's fp32 norm errs by far less than a sum in sequence could.
            tolerance = 1e-12 if implementation is not TorchDdp else 1e-5
            assert float(report.grad_norm) == pytest.approx(norm, rel=tolerance), implementation.name
            u = unit_roundoff(torch.float32)  # the coefficient, the product and the subtraction round; lr is exact
            for name, p in zip(before, whole, strict=True):
                change = PLAIN.lr * p.grad
                bound = (3 * u + tolerance) * change.abs() + u * p.abs() + torch.finfo(torch.float32).tiny
                difference = (engine.full_parameters()[name].double() - (p.detach() - change)).abs()
                assert (difference <= bound).all(), (implementation.name, precision, name)
            norms.append(float(report.grad_norm))
            engine.close()
    return norms


@pytest.mark.parametrize("n", [1, 2, 3])
def test_clips_by_the_norm_of_the_whole_gradient(n: int) -> None:
    first, *others = run_ranks(_clip, n)
    assert all(norms == first for norms in others)


def _below(rank: int, n: int, store: str) -> None:
    """A threshold above the norm: no bit changes. One element is all-reduced for it where gradients are parts."""
    join(rank, n, store)
    for implementation in ALL:
        results = []
        for clip_norm in (None, 1e6):
            engine, model = built(implementation, "mlp-tiny", rank, n, clip_norm=clip_norm)
            for step in range(2):
                backward(engine, model, step, rank)
                tap = Tap()
                tap.install()
                report = engine.step()
                tap.uninstall()
            assert (report.grad_norm is None) == (clip_norm is None)
            control = [call for call in tap.calls if call.numel == 1]
            assert len(control) == (clip_norm is not None and implementation in (Zero1, Zero2, Zero3))
            assert all(call.kind is Collective.ALL_REDUCE for call in control)
            results.append(everything(engine))
            engine.close()
        assert_same(*results, implementation.name)


def test_below_the_threshold_nothing_changes_and_nothing_is_sent_in_vain() -> None:
    run_ranks(_below, 2)


# -- the loss scale ----------------------------------------------------------------------------------------------------


def _overflow(rank: int, n: int, store: str) -> None:
    """inf or nan on rank 1 at the second step: a step that did not happen. The others are exact, at whatever scale."""
    join(rank, n, store)
    expected = None
    for implementation in ALL:
        for scale, poison in (
            (None, None),
            (256.0, float("inf")),
            ("dynamic", float("nan")),
            ("dynamic", float("inf")),
        ):
            changes: dict[str, Any] = {"precision": "fp16", "loss_scale": scale, "initial_scale": 256.0}
            engine, model = built(implementation, "dyadic", rank, n, bucket_numel=60, **changes)
            reports = []
            for step in range(3):
                what = (implementation.name, scale, poison, step)
                if step == 1:
                    if poison is None:
                        continue
                    before, held = everything(engine), engine.model_states()
                    backward(engine, model, step, rank, poison if rank else 1.0)
                    bits = [t.clone() for c in (Category.PARAMETER, Category.OPTIMIZER) for t in held[c]]
                    reports.append(engine.step())
                    after = [t for c in (Category.PARAMETER, Category.OPTIMIZER) for t in engine.model_states()[c]]
                    assert all(torch.equal(a, b) for a, b in zip(after, bits, strict=True)), what
                    assert_same(everything(engine), before, what)
                else:
                    backward(engine, model, step, rank)
                    reports.append(engine.step())
            if poison is not None:
                assert [report.skipped for report in reports] == [False, True, False], what
                halved = 128.0 if scale == "dynamic" else 256.0
                assert [report.loss_scale for report in reports] == [256.0, 256.0, halved], what
                assert all(float(r.grad_norm) > 0 for r in reports[::2]), what
            result = everything(engine)
            expected = expected or result
            assert_same(result, expected, what)
            engine.close()


def test_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace() -> None:
    run_ranks(_overflow, 2)


def _descends(rank: int, n: int, store: str) -> list[list[float]]:
    """Scales that steps used, from one that overflows fp16 until one does not."""
    join(rank, n, store)
    scales = []
    for implementation in ALL:
        engine, model = built(implementation, "dyadic", rank, n, precision="fp16", loss_scale="dynamic")
        skipped, used = True, []
        while skipped and len(used) < 20:
            backward(engine, model, 0, rank)
            report = engine.step()
            skipped = report.skipped
            used.append(float(report.loss_scale))
        assert not skipped
        scales.append(used)
        engine.close()
    return scales


def test_a_dynamic_scale_falls_until_nothing_overflows_on_any_rank() -> None:
    first, other = run_ranks(_descends, 2)
    assert first == other
    for used in first[: len(STAGES)]:
        assert used == [65536.0 / 2**k for k in range(len(used))] and len(used) > 1


def test_a_dynamic_scale_doubles_after_good_steps_and_goes_on_from_its_state() -> None:
    scale = LossScale("dynamic", 8.0)
    scale.update(True)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(False)
    assert scale.value == 4.0
    other = LossScale("dynamic", 64.0)
    other.restore(scale.state())
    for each in (scale, other):
        each.update(False)
        assert each.value == 8.0


@pytest.mark.parametrize("asked", [0.0, -1.0, "dynamc", float("nan")])
def test_a_loss_scale_that_is_none_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match="loss_scale"):
        LossScale(asked, 1.0)


# -- checkpoints -------------------------------------------------------------------------------------------------------

INITIAL_SCALE = 4096.0
SAVED: list[tuple[str, dict[str, Any], int]] = [  # model, job, steps before the save
    ("mlp-tiny", {"precision": "bf16", "optimizer": ADAMW, "loss_scale": "dynamic", "bucket_numel": 5000}, 2),
    ("dyadic-frozen", {"precision": "bf16", "optimizer": SGD, "bucket_numel": 27}, 2),
    ("dyadic-buffers", {"precision": "fp32", "optimizer": SGD}, 2),
    ("tinier", {"precision": "bf16", "optimizer": SGD}, 1),
    ("tinier", {"precision": "fp32", "optimizer": ADAMW}, 0),
]


def _save(rank: int, n: int, store: str, folder: Path) -> None:
    """Train, save, note everything; then train on to step 3 and note it again."""
    join(rank, n, store)
    for implementation in ALL:
        for i, (name, changes, steps) in enumerate(SAVED):
            engine, model = built(implementation, name, rank, n, initial_scale=INITIAL_SCALE, **changes)
            place = folder / f"{implementation.name}-{i}-of-{n}"
            for step in range(3):
                if step == steps:
                    place.mkdir(exist_ok=True)
                    whole = everything(engine)
                    if rank == 0:
                        torch.save(whole, f"{place}.saved")
                    engine.save(place)
                backward(engine, model, step, rank)
                engine.step()
            end = everything(engine)
            if rank == 0:
                torch.save(end, f"{place}.end")
            engine.close()


def _load(rank: int, n: int, store: str, folder: Path, saved_at: int) -> None:
    """Load into other weights and another scale; all is as it was saved, bit for bit, and goes on as it should."""
    join(rank, n, store)
    pairs = [(each, each) for each in ALL] + [(Zero2, Zero3), (Ddp, Zero1), (Zero3, Ddp)]
    for saver, loader in pairs:
        for i, (name, changes, steps) in enumerate(SAVED):
            what = (saver.name, saved_at, loader.name, n, name)
            model = models.build(name, world_size=n, micro_batches=1)
            with torch.no_grad():
                for tensor in (*model.module.parameters(), *model.module.buffers()):
                    tensor.add_(1)
            engine = loader().build(job_of(model, rank, n, initial_scale=2.0, **changes))
            place = folder / f"{saver.name}-{i}-of-{saved_at}"
            engine.load(place)
            assert_same(everything(engine), torch.load(f"{place}.saved"), what)
            for buffer_name, buffer in model.module.named_buffers():
                if buffer_name.endswith("seen"):
                    assert int(buffer) == steps, what
            exact = changes["optimizer"] is SGD
            history = fp64_history(name, n, 1, 3, SGD) if exact else []
            for step in range(steps, 3):
                backward(engine, model, step, rank)
                report = engine.step()
                assert report.loss_scale == (INITIAL_SCALE if "loss_scale" in changes else None), what
                if exact:
                    assert_same(copies(engine.full_parameters()), history[step], (*what, step))
            if n == saved_at:
                assert_same(everything(engine), torch.load(f"{place}.end"), what)
            engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for n in (2, 3, 4):
        run_ranks(_save, n, folder)
    return folder


@pytest.mark.parametrize(("saved_at", "n"), [(2, 2), (2, 1), (2, 3), (3, 2), (4, 2)])
def test_a_checkpoint_goes_on_at_any_number_of_ranks_and_any_stage(saved: Path, saved_at: int, n: int) -> None:
    run_ranks(_load, n, saved, saved_at)


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    engine, model = built(Zero2, "dyadic", 0, 1, precision="bf16")
    backward(engine, model, 0, 0)
    with pytest.raises(RuntimeError, match="between a backward and its step"):
        engine.save(tmp_path)
    engine.step()
    engine.save(tmp_path)
    for name, changes, said in (
        ("dyadic", {"precision": "fp16"}, "precision bf16; this job has fp16"),
        ("dyadic", {"precision": "bf16", "optimizer": ADAMW}, "optimizer sgd, 1 moments"),
        ("dyadic-frozen", {"precision": "bf16"}, "parameters .*second.weight"),
        ("dyadic-buffers", {"precision": "bf16"}, "buffers .*order"),
    ):
        other, _ = built(Zero1, name, 0, 1, **changes)
        before = everything(other)
        with pytest.raises(BadCheckpoint, match=said):
            other.load(tmp_path)
        assert_same(everything(other), before, said)
    shutil.copy(tmp_path / "rank-0-of-1.pt", tmp_path / "rank-0-of-2.pt")
    with pytest.raises(BadCheckpoint, match=r"\[1, 2\] ranks"):
        engine.load(tmp_path)
    (tmp_path / "rank-0-of-1.pt").unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks rank-1-of-2\.pt"):
        engine.load(tmp_path)


def test_a_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    engine, _ = built(Zero2, "dyadic", 0, 1)
    engine.save(tmp_path)
    file = tmp_path / "rank-0-of-1.pt"
    content = torch.load(file, weights_only=True)
    content["pieces"]["second.weight"]["master"] = content["pieces"]["second.weight"]["master"][:-1].clone()
    torch.save(content, file)
    with pytest.raises(BadCheckpoint, match=r"97 of the 98 elements of second\.weight"):
        engine.load(tmp_path)


# -- forwards that are not plain ---------------------------------------------------------------------------------------


def _forwards(rank: int, n: int, store: str) -> None:
    """Plain steps, steps with an evaluation before each, and steps that recompute activations have the same bits."""
    join(rank, n, store)
    psi = sum(p.numel() for p in models.build("gpt-tiny", world_size=n, micro_batches=1).module.parameters())
    for implementation in ALL:
        results = []
        for name, evaluates, early_stop in (
            ("gpt-tiny", False, True),
            ("gpt-tiny", True, True),
            ("gpt-tiny-checkpointed", False, True),  # recomputes a block as far as backward needs it
            ("gpt-tiny-checkpointed", False, False),  # to its end, hooks and all
        ):
            engine, model = built(implementation, name, rank, n, bucket_numel=4000)
            for step in range(3):
                if evaluates:
                    with torch.no_grad():
                        loss = engine.forward(model.batch(7, rank, 0), last=True)
                    assert not loss.requires_grad
                    if implementation is Zero3:
                        assert not any(allocated(bucket.weight) for bucket in engine.buckets)
                tap = Tap()
                tap.install()
                with set_checkpoint_early_stop(early_stop):
                    backward(engine, model, step, rank)
                engine.step()
                tap.uninstall()
            sent = {kind: sum(c.numel for c in tap.calls if c.kind is kind) for kind in {c.kind for c in tap.calls}}
            if implementation is Zero3:
                assert sent == {Collective.ALL_GATHER: 2 * psi, Collective.REDUCE_SCATTER: psi}, name
            results.append((sent, everything(engine)))
            engine.close()
        for sent, result in results[1:]:
            assert sent == results[0][0], implementation.name
            assert_same(result, results[0][1], implementation.name)


def test_evaluation_and_recomputation_change_no_bit_and_send_nothing_twice() -> None:
    run_ranks(_forwards, 2)


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    """A block used twice under re-entrant checkpointing yields its gradients twice; the first may be on the wire."""

    class Twice(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(checkpoint(self.block, x + i, use_reentrant=True).sum() for i in range(2))

    model = models.build("stack-4", world_size=1, micro_batches=1)
    job = job_of(model, 0, 1)
    object.__setattr__(job, "module", Twice(model.units[0]))
    object.__setattr__(job, "units", (model.units[0],))
    engine = Zero2().build(job)
    with pytest.raises(RuntimeError, match="a second gradient of"):
        engine.backward(engine.forward((torch.ones(2, 64, requires_grad=True),), last=True), last=True)
