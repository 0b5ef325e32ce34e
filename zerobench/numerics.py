"""Watching an engine's numbers beside the oracle's: what each scenario compares, and when.

A watcher is told of two moments of every step and writes `Comparison`s. Tensors stay in the rank; records get numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerobench.claims import Claims, OptimizerSpec, Recipe
from zerobench.difference import NAMED_DTYPES, compare, unit_roundoff
from zerobench.implementations.protocol import Job
from zerobench.oracle import Batch, Gradients, Oracle, adam_step
from zerobench.record import Comparison
from zerobench.scenarios import Scenario

Tensors = dict[str, Tensor]


class Watcher(Protocol):
    """Reads an engine at two moments of a step; both calls are collective."""

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None: ...

    def after_step(self, engine: Any, step: int, *, skipped: bool = False) -> None: ...


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
    quiet_until: nothing is read of the engine before this step, since a reading waits for all that is under way.
    """

    def __init__(self, oracle: Oracle, claims: Claims, spec: OptimizerSpec, *, quiet_until: int | None = None) -> None:
        self.oracle, self.lr, self.reads = oracle, spec.lr, "full_gradients" in claims.supports
        self.quiet_until = quiet_until
        self.comparisons: list[Comparison] = []
        self._right: Gradients | None = None
        buffers = oracle.module.named_buffers()
        self._buffers = [(n, b.detach().cpu().clone()) for n, b in buffers]

    def built(self, engine: Any) -> None:
        """Weights right after build (or load) are the oracle's: what moves later is judged from here."""
        if self.quiet_until is not None:
            return
        self._built = copied(engine.full_parameters())
        self._origin = {n: p.detach().cpu().clone() for n, p in self.oracle.masters.items()}
        self.comparisons += against(-1, "built", self._built, self._origin)

    def counted(self, step: int, module: nn.Module, forwards: int) -> None:
        """Buffers of the exact models: `seen` counts forwards, and whole numbers stay what they were. One that is cast,
        reset or run twice is off. Told apart by their order, since a module that was wrapped names them otherwise."""
        for (name, whole), buffer in zip(self._buffers, module.buffers(), strict=True):
            held = buffer.detach().cpu()
            if name.rpartition(".")[2] == "seen":
                self.comparisons.append(compare(step, "buffer", name, held, torch.full(held.shape, float(forwards))))
            elif not held.is_floating_point():
                self.comparisons.append(compare(step, "buffer", name, held, whole))

    def adopt(self, engine: Any) -> None:
        """Train on from the engine's own state, which was loaded: whether that is right is judged by its bits."""
        self.oracle.adopt(copied(engine.full_parameters()))
        states = {n: copied(s) for n, s in engine.full_optimizer_state().items()}
        self.oracle.adopt_momentum({n: s["momentum_buffer"] for n, s in states.items() if "momentum_buffer" in s})

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None:
        self._right = self.oracle.gradients(batches)
        self._start = {n: p.detach().clone() for n, p in self.oracle.masters.items()}
        if self.reads and self.quiet_until is None:
            actual = copied(engine.full_gradients())
            frozen = set(self.oracle.masters) - set(self.oracle.trainable)
            actual = {n: g for n, g in actual.items() if n not in frozen}
            self.comparisons += against(step, "gradient", actual, self._right.mean)

    def after_step(self, engine: Any, step: int, *, skipped: bool = False) -> None:
        if self.quiet_until is not None:
            assert self._right is not None
            self.oracle.step(self._right.mean)
            if step == self.quiet_until:
                right = {n: p.detach().cpu() for n, p in self.oracle.masters.items()}
                self.comparisons += against(step, "parameter", copied(engine.full_parameters()), right)
            return
        actual = copied(engine.full_parameters())
        if skipped:
            right = {n: p.detach().cpu() for n, p in self.oracle.masters.items()}
            self.comparisons += against(step, "skipped", actual, right)
            return
        assert self._right is not None
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
        for name, tensor in right.items():
            if name in actual and actual[name].shape == tensor.shape:
                moved, should = actual[name] != self._built[name], tensor != self._origin[name]
                self.comparisons.append(compare(step, "moved", name, moved.float(), should.float()))


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

    def after_step(self, engine: Any, step: int, *, skipped: bool = False) -> None:
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


class Clipping:
    """Clipping by the global norm, each step judged from the implementation's own gradient and weights before it.

    The norm is that of the whole gradient. In fp32, summed in any order, N squares err by at most N u relative, and
    their root by half of that: (N/2 + 2) u. The update of plain SGD is w - lr c g with c = min(1, max_norm / (norm +
    1e-6)), the form of torch.nn.utils.clip_grad_norm_, or without the 1e-6: whichever is nearer. It takes a product
    for c, one for the clipped gradient (stored in the gradient's dtype where that is narrower), one for lr, and a
    subtraction: 4 roundings of |lr c g|, one of |w|, and what c inherits from the norm. Where nothing is clipped c is
    exactly 1.
    """

    EPSILON = 1e-6

    def __init__(self, clip_norm: float, spec: OptimizerSpec, recipe: Recipe) -> None:
        self.clip_norm, self.lr = clip_norm, spec.lr
        self.narrow = unit_roundoff(NAMED_DTYPES[recipe.gradient])
        self.comparisons: list[Comparison] = []

    def after_backward(self, engine: Any, step: int, batches: Sequence[Batch]) -> None:
        self._gradients = {n: g.double() for n, g in copied(engine.full_gradients()).items()}
        self._weights = copied(engine.full_parameters())
        self._norm = float(torch.stack([g.square().sum() for g in self._gradients.values()]).sum().sqrt())
        numel = sum(g.numel() for g in self._gradients.values())
        self._norm_error = (numel / 2 + 2) * unit_roundoff(torch.float32)

    def reported(self, step: int, norm: float | None) -> None:
        """What the engine's step said of the norm before clipping."""
        right = torch.tensor([self._norm], dtype=torch.float64)
        if norm is None:
            self.comparisons.append(
                Comparison(step, "norm", "grad_norm", 1, 1, worst=float("inf"), note="not reported")
            )
        else:
            bound = right * self._norm_error
            self.comparisons.append(compare(step, "norm", "grad_norm", torch.tensor([norm]), right, bound=bound))

    def after_step(self, engine: Any, step: int, *, skipped: bool = False) -> None:
        u = unit_roundoff(torch.float32)
        actual = copied(engine.full_parameters())
        for name, gradient in self._gradients.items():
            weight = self._weights[name].double()
            candidates = []
            for epsilon in (self.EPSILON, 0.0):
                c = min(1.0, self.clip_norm / (self._norm + epsilon))
                change = self.lr * c * gradient.reshape(weight.shape)
                error = 4 * u + (self.narrow + self._norm_error if c < 1 else 0.0)
                bound = error * change.abs() + 2 * u * weight.abs()
                candidates.append(compare(step, "clipped update", name, actual[name], weight - change, bound=bound))
            self.comparisons.append(min(candidates, key=lambda c: c.worst))


class Trajectory:
    """Several steps of free training beside the oracle's, which at n*A <= 2 in fp32 is DDP's arithmetic bit for bit.

    Beyond that rounding differs, and training amplifies it. How much is measured on the oracle itself: twins whose
    every reduced gradient is off by exactly the largest rounding error that the claimed dtypes allow
    (Gradients.bound), with random signs, and every weight by three roundings. Twice the twins' largest deviation
    bounds a correct implementation's. Deviations of weights are pooled over a tensor; over all tensors with Adam,
    whose steps have one scale and where an element that rounding pushes across zero moves as far as any. Losses are
    few, so theirs are pooled over all ranks and steps; their floor is one rounding of the loss itself.
    """

    TWINS = 3

    def __init__(self, oracle: Oracle, twins: Sequence[Oracle], recipe: Recipe, spec: OptimizerSpec, rank: int) -> None:
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
            compare(
                step, "loss", f"rank {self.rank}", mine.float(), right.float(), bound=self._bound(step, right, floor)
            )
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

    def after_step(self, engine: Any, step: int, *, skipped: bool = False) -> None:
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


def watcher_of(scenario: Scenario, job: Job, claims: Claims, recipe: Recipe, rank: int, last: int) -> Watcher | None:
    """The watcher that a scenario asks for, made before the job's module is handed over; None where it asks for none.

    last: the last step of the run.
    """
    watch, spec = scenario.watch, job.optimizer

    def oracle() -> Oracle:
        how: dict[str, Any] = {"dtype": job.dtype, "compute": claims.compute, "master_from": claims.master_from}
        return Oracle(job.module, spec, **how)

    if "states" in watch:
        return AdamStates(claims, recipe, spec, [n for n, p in job.module.named_parameters() if p.requires_grad])
    if "clipping" in watch:
        return Clipping(scenario.clip_norm or 0.0, spec, recipe)
    if "oracle" in watch:
        return Exact(oracle(), claims, spec, quiet_until=last if scenario.delayed else None)
    if "trajectory" in watch:
        return Trajectory(oracle(), [oracle() for _ in range(Trajectory.TWINS)], recipe, spec, rank)
    return None
