"""Watching an engine's numbers beside the oracle's: what each scenario compares, and when.

A watcher is told of two moments of every step and writes `Comparison`s. Tensors stay in the rank; records get numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerobench.claims import Claims, OptimizerSpec, Recipe
from zerobench.difference import NAMED_DTYPES, compare, unit_roundoff
from zerobench.oracle import Batch, Gradients, Oracle, adam_step
from zerobench.record import Comparison

Tensors = dict[str, Tensor]


class Watcher(Protocol):
    """Reads an engine at two moments of a step; both calls are collective."""

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None: ...

    def after_step(self, engine: Any, step: int) -> None: ...


def against(step: int, what: str, actual: Tensors, right: Tensors, bounds: Tensors | None = None) -> list[Comparison]:
    """Every tensor of `right` with its namesake; one that is missing, or that nobody asked for, is a comparison too."""
    out = []
    for name, tensor in right.items():
        if name in actual:
            bound = bounds[name] if bounds else None
            out.append(compare(step, what, name, actual[name], tensor, bound=bound))
        else:
            n = tensor.numel()
            out.append(Comparison(step, what, name, n, n, worst=float("inf"), note="missing"))
    for name in sorted(set(actual) - set(right)):
        out.append(
            Comparison(step, what, name, actual[name].numel(), 1, worst=float("inf"), note="not a parameter's name")
        )
    return out


def copied(tensors: Tensors) -> Tensors:
    """Copies on the CPU, since an engine may reuse what it returns."""
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


class Exact:
    """The dyadic model: gradients and weights equal the oracle's bit for bit, at every step.

    Without full_gradients the first gradient is read from the first SGD step: w0 - w1 = lr g, exactly.
    """

    def __init__(self, oracle: Oracle, claims: Claims, spec: OptimizerSpec) -> None:
        self.oracle, self.lr, self.reads = oracle, spec.lr, "full_gradients" in claims.supports
        self.comparisons: list[Comparison] = []
        self._right: Gradients | None = None

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None:
        self._right = self.oracle.gradients(batches)
        self._start = {n: p.detach().clone() for n, p in self.oracle.masters.items()}
        if self.reads:
            actual = copied(engine.full_gradients())
            frozen = set(self.oracle.masters) - set(self.oracle.trainable)
            actual = {n: g for n, g in actual.items() if n not in frozen}
            self.comparisons += against(step, "gradient", actual, self._right.mean)

    def after_step(self, engine: Any, step: int) -> None:
        assert self._right is not None
        actual = copied(engine.full_parameters())
        if not self.reads and step == 0:
            read = {
                n: (self._start[n].double() - actual[n].double().reshape(self._start[n].shape)) / self.lr
                for n in self._right.mean
                if n in actual and actual[n].numel() == self._start[n].numel()
            }
            self.comparisons += against(step, "gradient", read, self._right.mean)
        self.oracle.step(self._right.mean)
        right = {n: p.detach().cpu() for n, p in self.oracle.masters.items()}
        self.comparisons += against(step, "parameter", actual, right)


class AdamStates:
    """Each Adam step judged from the implementation's own weights, moments and gradient before it."""

    def __init__(self, claims: Claims, recipe: Recipe, spec: OptimizerSpec, trainable: Sequence[str]) -> None:
        self.spec, self.trainable = spec, list(trainable)
        self.moments = NAMED_DTYPES[recipe.moments]
        stored = recipe.master or recipe.parameter
        self.stored_roundoff = 0.0 if stored in ("fp32", "fp64") else unit_roundoff(NAMED_DTYPES[stored])
        self.comparisons: list[Comparison] = []

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None:
        self._weights = copied(engine.full_parameters())
        self._gradients = copied(engine.full_gradients())
        self._state = {n: copied(s) for n, s in engine.full_optimizer_state().items()}

    def after_step(self, engine: Any, step: int) -> None:
        weights = copied(engine.full_parameters())
        states = {n: copied(s) for n, s in engine.full_optimizer_state().items()}
        for name in self.trainable:
            absent = [
                what
                for what, held in (("weight", self._weights), ("gradient", self._gradients), ("state", states))
                if name not in held
            ]
            if absent:
                self.comparisons.append(
                    Comparison(step, "adam", name, 1, 1, worst=float("inf"), note=f"no {', '.join(absent)} returned")
                )
                continue
            self._one(step, name, weights[name], states[name])

    def _one(self, step: int, name: str, weight: Tensor, state: Tensors) -> None:
        before = self._state.get(name, {})
        zero = torch.zeros_like(self._weights[name], dtype=torch.float32)
        right = adam_step(
            self.spec,
            self._weights[name],
            self._gradients[name].reshape(zero.shape),
            before.get("exp_avg", zero).reshape(zero.shape),
            before.get("exp_avg_sq", zero).reshape(zero.shape),
            step=step + 1,
            moments=self.moments,
            options=lambda option: self._option(name, option),
        )
        weight_bound = right.weight_bound + self.stored_roundoff * right.weight.abs()
        self.comparisons.append(compare(step, "adam weight", name, weight, right.weight, bound=weight_bound))
        for key, value, bound in (
            ("exp_avg", right.exp_avg, right.exp_avg_bound),
            ("exp_avg_sq", right.exp_avg_sq, right.exp_avg_sq_bound),
        ):
            if key in state:
                self.comparisons.append(
                    compare(step, f"adam {key}", name, state[key].reshape(zero.shape), value, bound=bound)
                )
            else:
                n = zero.numel()
                self.comparisons.append(Comparison(step, f"adam {key}", name, n, n, worst=float("inf"), note="missing"))
        if "step" in state:
            count = torch.tensor(float(step + 1))
            self.comparisons.append(compare(step, "adam step count", name, state["step"].reshape(()).float(), count))

    def _option(self, name: str, option: str) -> float:
        for group in self.spec.groups or ():
            if name in group.names and option in group.options:
                return float(group.options[option])
        return float(getattr(self.spec, option))


class Trajectory:
    """Several steps of free training beside the oracle's, which at n*A <= 2 in fp32 is DDP's arithmetic bit for bit.

    Beyond that rounding differs, and training amplifies it. How much is measured on the oracle itself: twins whose every
    reduced gradient is off by exactly the largest rounding error that the claimed dtypes allow (Gradients.bound), with
    random signs, and every weight by three roundings. Twice the twins' largest deviation bounds a correct implementation's.
    Deviations of weights are pooled over a tensor; over all tensors with Adam, whose steps have one scale and where an
    element that rounding pushes across zero moves as far as any. Losses are few, so theirs are pooled over all ranks and
    steps; their floor is one rounding of the loss itself.
    """

    TWINS = 3

    def __init__(
        self, oracle: Oracle, twins: Sequence[Oracle], recipe: Recipe, spec: OptimizerSpec, rank: int
    ) -> None:
        self.oracle, self.twins, self.rank = oracle, list(twins), rank
        self.pooled = spec.kind != "sgd"
        self.reduce = NAMED_DTYPES[recipe.reduce or recipe.gradient]
        self.gradient = NAMED_DTYPES[recipe.gradient]
        self.signs = torch.Generator().manual_seed(20191004)
        self._weights: list[Comparison] = []
        self._losses: list[tuple[int, Tensor, Tensor]] = []  # step, this rank's, right
        self._loss_spread = 0.0

    @property
    def comparisons(self) -> list[Comparison]:
        """All so far; the losses' bound is known only when every step has been seen."""
        floor = unit_roundoff(torch.float32)
        losses = [
            compare(step, "loss", f"rank {self.rank}", mine.float(), right.float(), bound=self._bound(step, right, floor))
            for step, mine, right in self._losses
        ]
        return [*losses, *self._weights]

    def _bound(self, step: int, right: Tensor, floor: float) -> Tensor:
        """Nothing but the loss's own rounding before the first update."""
        return 2 * (self._loss_spread if step else 0.0) + floor * right.abs()

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None:
        self._right = self.oracle.gradients(batches)
        self._twin_gradients = [twin.gradients(batches) for twin in self.twins]

    def losses(self, step: int, losses: Sequence[float], mine: Sequence[int]) -> None:
        """This rank's micro-batch losses; `mine` are their places among all of the step's micro-batches."""
        right = torch.tensor(self._right.losses, dtype=torch.float64)
        twins = torch.tensor([t.losses for t in self._twin_gradients], dtype=torch.float64)
        self._loss_spread = max(self._loss_spread, float((twins - right).abs().max()))
        self._losses.append((step, torch.tensor(losses, dtype=torch.float64), right[list(mine)]))

    def after_step(self, engine: Any, step: int) -> None:
        self.oracle.step(self._right.mean)
        for twin, gradients in zip(self.twins, self._twin_gradients, strict=True):
            bounds = gradients.bound(reduce=self.reduce, gradient=self.gradient)
            twin.step({n: g + bounds[n] * self._sign(g) for n, g in gradients.mean.items()})
            self._shake(twin)
        right = {n: p.detach().cpu() for n, p in self.oracle.masters.items()}
        spread = {
            n: max(float((t.masters[n].detach().cpu().double() - w.double()).abs().max()) for t in self.twins)
            for n, w in right.items()
        }
        if self.pooled:
            spread = dict.fromkeys(spread, max(spread.values()))
        bound = {n: torch.full(w.shape, 2 * spread[n], dtype=torch.float64) for n, w in right.items()}
        self._weights += against(step, "trajectory", copied(engine.full_parameters()), right, bound)

    def _sign(self, like: Tensor) -> Tensor:
        return torch.randint(0, 2, like.shape, generator=self.signs, dtype=torch.float64) * 2 - 1

    def _shake(self, twin: Oracle) -> None:
        u = unit_roundoff(torch.float32)
        with torch.no_grad():
            for name in twin.trainable:
                w = twin.masters[name]
                w.copy_((w.double().cpu() * (1 + 3 * u * self._sign(w))).to(w.dtype))
