"""The oracle against closed forms, and its bounds against torch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zerobench.claims import OptimizerSpec, ParamGroup
from zerobench.difference import compare, constant_factor, ulps, unit_roundoff
from zerobench.oracle import Oracle, adam_step
from zerobench.scenarios import ADAMW, SGD


class Line(nn.Module):
    """loss = mean (w x - y)^2 / 2, whose gradient is mean (w x - y) x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.w * x.to(self.w.dtype) - y).square() / 2).float().mean()


def batch(x: float, y: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([x]), torch.tensor([y])


def test_the_mean_gradient_and_momentum_are_the_closed_form() -> None:
    oracle = Oracle(Line(), SGD, dtype=torch.float32)
    found = oracle.gradients([batch(1.0, 1.0), batch(2.0, 0.0)])  # (2-1)*1 = 1 and (4-0)*2 = 8
    assert found.mean["w"].tolist() == [4.5]
    assert found.magnitude["w"].tolist() == [4.5]
    assert found.losses == [0.5, 8.0]
    oracle.step(found.mean)
    assert oracle.masters["w"].tolist() == [2.0 - SGD.lr * 4.5]
    oracle.step({"w": torch.zeros(1)})  # only momentum moves it now
    assert oracle.masters["w"].tolist() == [2.0 - SGD.lr * 4.5 - SGD.lr * SGD.momentum * 4.5]


def test_groups_keep_their_own_rate_and_no_parameter_is_lost() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    spec = OptimizerSpec("sgd", lr=1.0, groups=(ParamGroup(("0.weight",), {"lr": 0.5}), ParamGroup((), {"lr": 9.0})))
    oracle = Oracle(module, spec, dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in oracle.masters.items()}
    oracle.step({n: torch.ones_like(p) for n, p in before.items()})
    moved = {n: float((before[n] - p.detach()).sum()) for n, p in oracle.masters.items()}
    assert moved == pytest.approx({"0.weight": 0.5, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0})


def test_sixteen_bit_weights_are_cast_from_fp32_masters() -> None:
    module = Line()
    with torch.no_grad():
        module.w.fill_(1.0 + 2.0**-12)  # no bf16 number
    kept = Oracle(module, SGD, dtype=torch.bfloat16)
    rounded = Oracle(module, SGD, dtype=torch.bfloat16, master_from="parameter")
    assert float(kept.masters["w"]) == 1.0 + 2.0**-12
    assert float(rounded.masters["w"]) == 1.0
    assert kept.gradients([batch(1.0, 0.0)]).mean["w"].tolist() == [1.0]


values = st.floats(-100, 100, width=32)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(values, values, values, st.floats(0, 100, width=32)), min_size=1, max_size=8), st.integers(1, 50)
)
def test_torch_adamw_stays_within_the_derived_bound(rows: list[tuple[float, ...]], step: int) -> None:
    w, g, m, v = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    right = adam_step(ADAMW, w, g, m, v, step=step, moments=torch.float32, options=lambda k: float(getattr(ADAMW, k)))
    p = nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([p], **ADAMW.options())
    optimizer.state[p] = {"step": torch.tensor(float(step - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    p.grad = g.clone()
    optimizer.step()
    state = optimizer.state[p]
    for name, actual, value, bound in (
        ("weight", p.detach(), right.weight, right.weight_bound),
        ("exp_avg", state["exp_avg"], right.exp_avg, right.exp_avg_bound),
        ("exp_avg_sq", state["exp_avg_sq"], right.exp_avg_sq, right.exp_avg_sq_bound),
    ):
        found = compare(0, "adam", name, actual, value, bound=bound + torch.finfo(torch.float32).tiny)
        assert found.worst <= 1, (name, found)


def test_the_adam_bound_tells_a_wrong_step_count() -> None:
    one = torch.full((4,), 1.0)
    options = lambda k: float(getattr(ADAMW, k))  # noqa: E731
    right = adam_step(ADAMW, one, one, one, one, step=2, moments=torch.float32, options=options)
    off = adam_step(ADAMW, one, one, one, one, step=3, moments=torch.float32, options=options)
    assert compare(0, "adam", "w", off.weight, right.weight, bound=right.weight_bound).worst > 100


@given(st.integers(1, 8), st.permutations(range(8)))
def test_any_order_of_summation_stays_within_the_gradient_bound(terms: int, order: list[int]) -> None:
    """Sums of `terms` bf16 numbers in bf16, in any order, divided before or after."""
    random = torch.Generator().manual_seed(terms)
    parts = [torch.randn(32, generator=random).bfloat16() for _ in range(8)][:terms]
    exact = sum(p.double() for p in parts) / terms
    magnitude = sum(p.double().abs() for p in parts) / terms
    u = unit_roundoff(torch.bfloat16)
    bound = ((terms + 1) * u + u) * magnitude
    for before in (True, False):
        total = torch.zeros(32, dtype=torch.bfloat16)
        for i in [o for o in order if o < terms]:
            total = total + (parts[i] / terms if before else parts[i])
        mean = total if before else total / terms
        assert bool(((mean.double() - exact).abs() <= bound).all())


def test_a_constant_factor_is_named_and_noise_is_not() -> None:
    right = torch.tensor([1.0, -2.0, 0.0, 4.0], dtype=torch.float64)
    assert constant_factor(right * 3, right) == pytest.approx(3)
    assert constant_factor(right + torch.tensor([0, 1.0, 0, 0]), right) is None
    assert constant_factor(torch.zeros(4, dtype=torch.float64), right) == 0
    assert constant_factor(right, torch.zeros(4, dtype=torch.float64)) is None


def test_comparisons_say_where_and_how_much() -> None:
    right = torch.tensor([1.0, 2.0, 3.0])
    off = right.clone()
    off[1] += 2.0**-22  # two ulp of 2.0 in fp32
    found = compare(3, "parameter", "w", off, right)
    assert (found.mismatches, found.first, found.max_ulp, found.worst) == (1, 1, 1.0, float("inf"))
    assert compare(3, "parameter", "w", off, right, bound=torch.full((3,), 1.0)).worst < 1
    assert compare(0, "p", "w", torch.zeros(2), right).note == "shape (2,), should be (3,)"
    broken = torch.tensor([1.0, float("nan"), 3.0])
    assert compare(0, "p", "w", broken, right, bound=torch.ones(3)).worst == float("inf")
    assert compare(0, "p", "w", broken, copy.copy(broken)).mismatches == 0


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.floats(1e-3, 1e3))
def test_an_ulp_is_the_gap_to_the_next_number(dtype: torch.dtype, x: float) -> None:
    value = torch.tensor(x).to(dtype)
    up = torch.nextafter(value, torch.tensor(float("inf"), dtype=dtype)) if dtype == torch.float32 else None
    gap = (up - value).double() if up is not None else value.double().abs() * 0 + _gap(value)
    assert float(ulps(gap, value.double(), dtype)) == 1.0


def _gap(value: Tensor) -> Tensor:
    """The distance to the next 16-bit number away from zero, by its bits."""
    bits = value.view(torch.int16) + 1
    return bits.view(value.dtype).double() - value.double()
