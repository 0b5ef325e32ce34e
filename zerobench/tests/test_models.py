"""Models are deterministic, keyed by the global example, observable; and the dyadic one is exact."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from zerobench import models
from zerobench.scenarios import SGD

SMALL = [name for name in models.names() if not name.endswith(("m", "128b", "1t"))]
ON_A_CPU = [*SMALL, "mlp-2m", "mlp-4m", "mlp-8m", "gpt-8m"]  # the others are for GPUs, or to be simulated
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
DYADIC = [name for name in models.names() if name.startswith("dyadic")]
EDGES = ["shapes", "giant", "tinier"]


def psi(model: models.Model) -> int:
    return sum(p.numel() for p in model.module.parameters() if p.requires_grad)


def test_listing_names_imports_no_torch() -> None:
    code = "import sys, zerobench.models as m; assert m.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gpt-tiny'"):
        models.build("gtp-tiny", world_size=1, micro_batches=1)


def test_sizes() -> None:
    built = {name: psi(models.build(name, world_size=1, micro_batches=1)) for name in ON_A_CPU}
    assert 20_000 < built["mlp-tiny"] < 90_000 and built["mlp-tiny"] % 3 and built["mlp-tiny"] % 4
    assert 25_000 < built["gpt-tiny"] < 110_000
    assert built["mlp-2m"] >= 2_000_000 and built["mlp-8m"] >= 8_000_000 and built["gpt-8m"] >= 8_000_000
    assert built["stack-32"] == 4 * built["stack-8"] == 8 * built["stack-4"]
    assert all(built["dyadic"] % k for k in (2, 3, 4))


@pytest.mark.parametrize("name", SMALL)
def test_same_weights_and_global_random_state_untouched(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = models.build(name, world_size=2, micro_batches=1)
    one.batch(0, 1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = models.build(name, world_size=2, micro_batches=1)
    for (key, a), b in zip(one.module.state_dict().items(), other.module.state_dict().values(), strict=True):
        assert torch.equal(a, b) and a.dtype == (torch.float32 if a.is_floating_point() else torch.int64), key


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny", "dyadic"])
def test_splits_of_a_step_see_the_same_examples(name: str) -> None:
    def step(n: int, a: int) -> tuple[Tensor, ...]:
        model = models.build(name, world_size=n, micro_batches=a)
        micro = [model.batch(1, rank, m) for m in range(a) for rank in range(n)]
        return tuple(torch.cat(column) for column in zip(*micro, strict=True))

    reference = step(4, 1)
    for n, a in ((2, 2), (1, 4)):
        assert all(torch.equal(x, y) for x, y in zip(step(n, a), reference, strict=True)), (n, a)
    assert len({tuple(row.tolist()) for row in reference[0]}) > 1


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_is_a_finite_fp32_scalar_in_every_precision(name: str, dtype: torch.dtype) -> None:
    model = models.build(name, world_size=2, micro_batches=1)
    loss = model.module.to(dtype)(*model.batch(0, 0, 0))
    assert loss.shape == () and loss.dtype == torch.float32 and torch.isfinite(loss)
    loss.backward()
    used = [n for n, p in model.module.named_parameters() if p.requires_grad and n != "second.spare"]
    grads = dict(model.module.named_parameters())
    assert all(grads[n].grad.abs().sum() > 0 for n in used), name


@pytest.mark.parametrize("name", SMALL)
def test_units_hold_parameters_and_observe_sees_each_from_the_last(name: str) -> None:
    model = models.build(name, world_size=1, micro_batches=1)
    assert len(model.units) >= 2 and all(any(True for _ in unit.parameters()) for unit in model.units)
    seen: list[str] = []
    copied = copy.deepcopy(model.module).to(torch.bfloat16)  # as an implementation may do
    loss = copied(*model.batch(0, 0, 0))
    model.observe(seen.append)
    loss.backward()
    assert seen == [f"block {i}" for i in reversed(range(len(model.units)))]
    model.observe(None)
    copied(*model.batch(0, 0, 0)).backward()
    assert len(seen) == len(model.units)


def test_observing_changes_no_bit() -> None:
    model = models.build("gpt-tiny", world_size=1, micro_batches=1)
    losses = []
    for callback in (None, lambda name: None):
        model.module.zero_grad()
        model.observe(callback)
        model.module(*model.batch(0, 0, 0)).backward()
        losses.append([p.grad.clone() for p in model.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


# -- the dyadic model --------------------------------------------------------------------------------------------------


def units_in_last_place(terms: Tensor) -> Tensor:
    """Sum of |terms| over dim 0, in units of the largest power of two that divides every term; element by element.

    At most 2**p: then every partial sum, in whatever order and grouping, has p bits of significand or fewer.
    """
    assert torch.equal(terms * 2**16, (terms * 2**16).round())
    whole = (terms * 2**16).to(torch.int64)
    common = torch.zeros_like(whole[0])
    for row in whole:
        common |= row.abs()
    lowest = torch.where(common == 0, 1, common & -common)
    return whole.abs().sum(0) / lowest


def gradients(module: torch.nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad(set_to_none=True)
    loss = module(*batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DYADIC)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_dyadic_is_exact_in_every_precision_and_order(name: str, n: int) -> None:
    for a in (1, 2, 3, 4) if name == "dyadic" else (1, 3):
        _prove_dyadic(name, n, a)


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_edges_are_exact_in_every_precision_and_order(name: str, n: int) -> None:
    for a in (1, 2):
        _prove_dyadic(name, n, a)


def _prove_dyadic(name: str, n: int, a: int) -> None:
    model = models.build(name, world_size=n, micro_batches=a)
    exact = copy.deepcopy(model.module).double()
    narrow = {dtype: copy.deepcopy(model.module).to(dtype) for dtype in SIGNIFICAND_BITS}
    optimizer = SGD.torch()([p for p in exact.parameters() if p.requires_grad], **SGD.options())
    touched = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in exact.named_parameters()}
    shuffled = torch.randperm(n * a, generator=torch.Generator().manual_seed(n * a))
    for step in range(3):
        for dtype, module in narrow.items():
            for w, p in zip(exact.parameters(), module.parameters(), strict=True):
                p.data.copy_(w)
                assert torch.equal(p.double(), w), (dtype, step)  # the 16-bit weight is the master
        micro = [model.batch(step, rank, m) for m, rank in itertools.product(range(a), range(n))]
        results = [gradients(exact, batch) for batch in micro]
        terms = {name: torch.stack([g[name] for _, g in results]) for name in results[0][1]}
        for dtype, module in narrow.items():
            for batch, (loss, grads) in zip(micro, results, strict=True):
                got_loss, got = gradients(module, batch)
                assert torch.equal(got_loss.double(), loss.double()), (dtype, step)
                assert all(torch.equal(got[name].double(), grads[name]) for name in grads), (dtype, step)
        for key, stacked in terms.items():
            assert units_in_last_place(stacked).max() <= 2 ** SIGNIFICAND_BITS[torch.bfloat16], (key, step)
            mean = stacked.sum(0) / (n * a)
            touched[key] |= mean != 0
            for dtype in SIGNIFICAND_BITS:
                late = early = torch.zeros_like(stacked[0], dtype=dtype)
                for index in shuffled:
                    term = stacked[index].to(dtype)
                    late = late + term
                    early = early + term / a / n
                assert torch.equal((late / n / a).double(), mean) and torch.equal(early.double(), mean), (key, dtype)
        for key, p in exact.named_parameters():
            if key in terms:
                p.grad = terms[key].sum(0) / (n * a)
        optimizer.step()
    assert all(torch.equal(p.bfloat16().double(), p) for p in exact.parameters())
    untrained = {"second.spare"} | {name for name, p in exact.named_parameters() if not p.requires_grad}
    hit = sum(int(t.sum()) for name, t in touched.items() if name not in untrained)
    assert hit == sum(t.numel() for name, t in touched.items() if name not in untrained)


def test_dyadic_gradients_depend_on_the_weights_and_ranks_differ() -> None:
    model = models.build("dyadic", world_size=2, micro_batches=1)
    _, first = gradients(model.module, model.batch(0, 0, 0))
    _, other = gradients(model.module, model.batch(0, 1, 0))
    assert all(not torch.equal(first[name], other[name]) for name in first)
    with torch.no_grad():
        model.module.first.weight.add_(1)
    _, moved = gradients(model.module, model.batch(0, 0, 0))
    assert not torch.equal(moved["second.weight"], first["second.weight"])


def test_dyadic_variants_are_what_they_say() -> None:
    built = {name: models.build(name, world_size=1, micro_batches=1).module for name in DYADIC}
    assert built["dyadic-tied"].first.shift is built["dyadic-tied"].second.shift
    assert not built["dyadic-frozen"].second.weight.requires_grad
    spare = built["dyadic-unused"].second.spare
    assert spare.requires_grad
    built["dyadic-unused"](*models.build("dyadic-unused", world_size=1, micro_batches=1).batch(0, 0, 0)).backward()
    assert spare.grad is None


def test_buffers_are_read_counted_and_not_rounded() -> None:
    model = models.build("dyadic-buffers", world_size=1, micro_batches=1)
    _, before = gradients(model.module, model.batch(0, 0, 0))
    model.module.eval()(*model.batch(0, 0, 0))
    buffers = dict(model.module.named_buffers())
    assert buffers["first.buffered.seen"] == buffers["second.buffered.seen"] == 1  # in training mode only
    assert buffers["first.buffered.order"].dtype == torch.int64
    buffers["first.buffered.order"].copy_(buffers["first.buffered.order"].roll(1))
    _, after = gradients(model.module.train(), model.batch(0, 0, 0))
    assert not torch.equal(before["first.shift"], after["first.shift"])


# -- sizes at the edges ------------------------------------------------------------------------------------------------


def test_edges_are_what_they_say() -> None:
    built = {name: models.build(name, world_size=1, micro_batches=1).module for name in EDGES}
    sizes = {name: [p.numel() for p in module.parameters()] for name, module in built.items()}
    wanted = {1, 15, 16, 17} | {size for n in (2, 3, 4) for size in (n - 1, n, n + 1)}
    assert set(sizes["shapes"]) == wanted and len(sizes["shapes"]) == len(wanted)
    assert len(sizes["giant"]) == 3 and 8 * max(sizes["giant"]) > 7 * sum(sizes["giant"])  # above a bucket of Psi/8
    assert sum(sizes["tinier"]) == 3


def test_edges_gradients_depend_on_the_weights_and_ranks_differ() -> None:
    model = models.build("shapes", world_size=2, micro_batches=1)
    _, first = gradients(model.module, model.batch(0, 0, 0))
    _, other = gradients(model.module, model.batch(0, 1, 0))
    assert any(not torch.equal(first[name], other[name]) for name in first)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.neg_()
    _, flipped = gradients(model.module, model.batch(0, 0, 0))
    assert all(torch.equal(first[name], -flipped[name]) for name in first)


def test_checkpointed_twin_has_the_same_weights_losses_and_gradients() -> None:
    plain = models.build("gpt-tiny", world_size=1, micro_batches=1)
    twin = models.build("gpt-tiny-checkpointed", world_size=1, micro_batches=1)
    calls = [0]
    twin.units[0].register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    batch = plain.batch(0, 0, 0)
    assert torch.equal(twin.batch(0, 0, 0)[0], batch[0])
    (loss, expected), (other, actual) = gradients(plain.module, batch), gradients(twin.module, batch)
    assert torch.equal(loss, other) and all(torch.equal(actual[name], expected[name]) for name in expected)
    assert calls == [2]  # once in forward, once in backward
