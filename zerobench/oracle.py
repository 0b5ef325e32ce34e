"""The oracle: the simplest textbook training, in one process, over all n*A micro-batches of a step.

What is right is the mean of the micro-batches' gradients, applied by torch.optim to whole fp32 weights. The sum over
micro-batches is taken in fp64 and rounded once: of two fp32 terms (n*A = 2) that is bit for bit what any reduction of
two terms gives, and on the dyadic model it is bit for bit what any reduction gives.

In mixed precision each micro-batch is computed as the implementation claims to: with weights cast from the masters
("cast"), or with fp32 weights under autocast ("autocast").
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerobench.claims import OptimizerSpec
from zerobench.difference import unit_roundoff

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Gradients:
    """Of one step, by parameter name, fp64 on the CPU. mean: over all micro-batches. magnitude: the mean of their
    absolute values, which bounds the rounding of any order of summation. losses: one a micro-batch, in the order
    given."""

    mean: dict[str, Tensor]
    magnitude: dict[str, Tensor]
    terms: int
    losses: list[float]

    def bound(self, *, reduce: torch.dtype, gradient: torch.dtype) -> dict[str, Tensor]:
        """The most by which a correct reduction may differ, element by element.

        k terms summed in any order in a dtype of unit roundoff u err by at most (k-1) u sum|g_i| to first order (Higham
        2002, section 4.2); dividing each term or the sum adds one rounding a term, storing the result one more; the
        second-order rest is covered by one further term. So |error| <= ((k+1) u_reduce + u_gradient) mean|g_i|.
        """
        scale = (self.terms + 1) * unit_roundoff(reduce) + unit_roundoff(gradient)
        return {name: scale * magnitude for name, magnitude in self.magnitude.items()}


class Oracle:
    """Textbook training of `module` (fp32, copied). masters: name -> fp32 parameter, a tied weight under its first
    name."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSpec,
        *,
        dtype: torch.dtype,
        compute: str = "cast",
        master_from: str = "fp32",
    ) -> None:
        self.dtype, self.compute = dtype, compute
        self.module = copy.deepcopy(module)
        source = copy.deepcopy(module).to(dtype) if master_from == "parameter" else module
        self.masters = {n: nn.Parameter(p.detach().to(torch.float32, copy=True)) for n, p in source.named_parameters()}
        if compute == "cast":
            self.module.to(dtype)
        trainable = {n for n, p in module.named_parameters() if p.requires_grad}
        self.trainable = [n for n in self.masters if n in trainable]
        self.optimizer = optimizer.torch()(self._groups(optimizer), **optimizer.options())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def _groups(self, spec: OptimizerSpec) -> list[dict[str, object]]:
        left = dict.fromkeys(self.trainable)
        groups: list[dict[str, object]] = []
        for group in spec.groups or ():
            names = [n for n in group.names if n in left]
            groups.append({"params": [self.masters[n] for n in names], **group.options})
            for n in names:
                del left[n]
        if left or not groups:
            groups.append({"params": [self.masters[n] for n in left]})
        return groups

    def gradients(self, batches: Sequence[Batch]) -> Gradients:
        """The mean gradient of `batches` (each a micro-batch) at the current masters."""
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, master in self.masters.items():
                parameters[name].copy_(master)
        mean = {n: torch.zeros(self.masters[n].shape, dtype=torch.float64) for n in self.trainable}
        magnitude = {n: torch.zeros_like(g) for n, g in mean.items()}
        losses = []
        for batch in batches:
            self.module.zero_grad(set_to_none=True)
            with torch.autocast(batch[0].device.type, dtype=self.dtype, enabled=self._autocast):
                loss = self.module(*batch)
            loss.backward()
            losses.append(float(loss.detach()))
            for name in self.trainable:
                gradient = parameters[name].grad
                if gradient is not None:
                    term = gradient.detach().to("cpu", torch.float64)
                    mean[name] += term
                    magnitude[name] += term.abs()
        self.module.zero_grad(set_to_none=True)
        k = len(batches)
        return Gradients({n: g / k for n, g in mean.items()}, {n: m / k for n, m in magnitude.items()}, k, losses)

    @property
    def _autocast(self) -> bool:
        return self.compute == "autocast" and self.dtype != torch.float32

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Apply `gradients` (by name) to the masters with torch.optim."""
        for name in self.trainable:
            master = self.masters[name]
            master.grad = gradients[name].to(master.device, torch.float32)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr_factor(self, factor: float) -> None:
        """From now on every group's learning rate is `factor` times the spec's."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def adopt(self, parameters: dict[str, Tensor]) -> None:
        """Go on from these weights instead of our own."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(parameters[name].reshape(master.shape))

    def adopt_momentum(self, buffers: dict[str, Tensor]) -> None:
        """Go on with these momentum buffers (SGD)."""
        for name, buffer in buffers.items():
            master = self.masters[name]
            self.optimizer.state[master]["momentum_buffer"] = (
                buffer.reshape(master.shape).to(master.device, master.dtype).clone()
            )


@dataclass(frozen=True)
class AdamStep:
    """One textbook Adam step in fp64, and the most by which a correct fp32 one may differ, for weight and both
    moments."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight_bound: Tensor
    exp_avg_bound: Tensor
    exp_avg_sq_bound: Tensor


def adam_step(
    spec: OptimizerSpec,
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    moments: torch.dtype,
    options: Callable[[str], float],
) -> AdamStep:
    """Textbook Adam (Kingma and Ba 2015, algorithm 1; decoupled decay: Loshchilov and Hutter 2019, algorithm 2).

    All tensors of one shape; `step` counts from 1; `moments` is the dtype in which the moments are kept;
    options(name) is lr or weight_decay of this parameter's group. Bounds, with u of fp32 and u' of the moments'
    dtype:

    m' = m + (1-b1)(g-m), whose terms pass a difference, a product, a sum and a rounded coefficient: 4 roundings of at
    most |m|+|g|, and one for a gradient that is unscaled on the way: 5u(|m|+|g|) + u'|m'|. v' is a sum of positive
    terms of 4 roundings each, and twice the gradient's one: 6u v' + u'v'. The denominator takes half of that and 4
    roundings (root, division, eps, sum); the quotient two more, and a step size computed in fp64 and rounded: with q
    = |m'|/denominator, |error of the step| <= lr' (err(m')/denominator + q (3u + u'/2 + 4u + 3u)), and the weight
    takes 3 roundings (decay, sum, store) of at most |w| + |step|.
    """
    u, um = unit_roundoff(torch.float32), unit_roundoff(moments)
    if moments == torch.float32:
        um = 0.0  # the store is one of the roundings already counted
    w, g, m, v = (t.to(torch.float64) for t in (weight, gradient, exp_avg, exp_avg_sq))
    b1, b2 = spec.betas
    lr, decay = options("lr"), options("weight_decay")
    start = w
    if spec.kind == "adam":
        g = g + decay * w
    else:
        w = w * (1 - lr * decay)
    m1 = m + (1 - b1) * (g - m)
    v1 = b2 * v + (1 - b2) * g * g
    rate = lr / (1 - b1**step)
    denominator = (v1 / (1 - b2**step)).sqrt() + spec.eps
    change = rate * m1 / denominator
    m_bound = 5 * u * (m.abs() + g.abs()) + um * m1.abs()
    v_bound = (6 * u + um) * v1 + torch.finfo(torch.float32).tiny
    change_bound = rate * m_bound / denominator + change.abs() * (10 * u + um / 2)
    return AdamStep(
        weight=w - change,
        exp_avg=m1,
        exp_avg_sq=v1,
        weight_bound=change_bound + 3 * u * (start.abs() + change.abs()),
        exp_avg_bound=m_bound,
        exp_avg_sq_bound=v_bound,
    )
