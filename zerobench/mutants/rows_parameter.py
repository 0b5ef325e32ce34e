"""One trainable or frozen parameter of `rows`, and all that belongs to it. There is no buffer in which parameters meet.

A parameter's elements, flattened, are cut into n contiguous chunks, as even as they come: the first (numel mod n) ranks
have one element more, and there is no padding. Rank r owns chunk r. A chunk of the gradient is reduced to its owner
where autograd left it, a chunk of the weight is broadcast by its owner to where the module reads it, so that no
collective needs a copy. A parameter with fewer elements than ranks leaves the last ranks an empty chunk.

At stage 0 nothing is cut: there is one chunk, the whole, and every rank holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobench.implementations.protocol import Job
from zerobench.terms import Category, Stage


def partition(numel: int, n: int) -> list[int]:
    """Lengths of `n` contiguous chunks of `numel` elements: they differ by one at most, long ones first."""
    return [numel // n + (rank < numel % n) for rank in range(n)]


class Row:
    """A parameter of numel elements, of which this rank owns `sizes[place]`.

    chunk: this rank's part of the weight, in the job's dtype: a view of the parameter, or at stage 3 all that is kept
    of it. master: the fp32 copy that the optimizer updates; in fp32, and for a frozen parameter, the chunk itself.
    gradient: this rank's part of the mean gradient (times the loss scale), in the job's dtype, once reduced.
    divisor: n A, of the sum over ranks and micro-batches.
    """

    cut = staticmethod(partition)

    def __init__(
        self, name: str, parameter: nn.Parameter, job: Job, stage: Stage, overrides: Mapping[str, Any]
    ) -> None:
        self.name, self.parameter, self.stage = name, parameter, stage
        self.n = job.world.size
        self.divisor = self.n * job.micro_batches
        cut = stage.shards(Category.OPTIMIZER)
        self.sizes = self.cut(parameter.numel(), self.n if cut else 1)
        self.place = job.world.rank if cut else 0
        self.shape, self.trainable = parameter.shape, parameter.requires_grad

        precise = parameter.detach().contiguous()
        parameter.data = precise.to(job.dtype)
        self.chunk = self.own(self.flat)
        if stage.shards(Category.PARAMETER):
            self.chunk = self.chunk.clone()
        self.master = self.chunk
        if self.trainable and self.chunk.dtype != torch.float32:
            self.master = self.own(precise.view(-1)).clone()
        self.gradient: Tensor | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if self.trainable:
            options = job.optimizer.options() | dict(overrides)
            self.optimizer = job.optimizer.torch()([self.master], **options)
            self.rate = float(options["lr"])
        if stage.shards(Category.PARAMETER):
            self.release()

    @property
    def flat(self) -> Tensor:
        """The whole weight, (numel,): the module's own memory. `.data`, because autograd must not see what we write."""
        return self.parameter.data.view(-1)

    def own(self, flat: Tensor) -> Tensor:
        """This rank's part of `flat` (numel,): a view."""
        return torch.split(flat, self.sizes)[self.place]

    # The gradient

    def reduce(self) -> list[dist.Work]:
        """Start the mean of this rank's `parameter.grad` with everyone's: in place, each chunk valid at its owner.

        Division by n A comes first, so that a 16-bit sum over ranks stays in range. A parameter that took no part in
        the loss takes part here, with zeros: another rank may have used it.
        """
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        flat = self.parameter.grad.view(-1)
        flat.div_(self.divisor)
        if self.n == 1:
            return []
        if not self.stage.shards(Category.OPTIMIZER):
            return _started(dist.all_reduce(flat, async_op=True))
        works = []
        for owner, part in enumerate(torch.split(flat, self.sizes)):
            if part.numel():
                works += _started(dist.reduce(part, dst=owner, async_op=True))
        return works

    def reduced(self) -> None:
        """Take this rank's chunk of a finished reduction; from stage 2 on the whole gradient is freed."""
        assert self.parameter.grad is not None
        mine = self.own(self.parameter.grad.view(-1))
        if not self.stage.shards(Category.GRADIENT):
            self.gradient = mine
            return
        if self.gradient is None:
            self.gradient = mine.clone()  # a view would keep the whole gradient alive
        else:
            self.gradient.add_(mine)
        self.parameter.grad = None

    def clear(self) -> None:
        self.gradient = self.parameter.grad = None

    def unscaled(self, scale: float) -> Tensor:
        """This rank's part of the mean gradient, fp32, without the loss scale. Not a copy in fp32 at scale 1."""
        assert self.gradient is not None, f"{self.name} has no reduced gradient: backward(last=True) comes first"
        gradient = self.gradient.float()
        return gradient if scale == 1.0 else gradient / scale

    # The weight

    def update(self, scale: float, coefficient: Tensor | None) -> None:
        """One optimizer step on the chunk. coefficient: what clipping multiplies the gradient by."""
        assert self.optimizer is not None
        gradient = self.unscaled(scale)
        self.master.grad = gradient if coefficient is None else gradient.mul_(coefficient)
        self.optimizer.step()
        self.master.grad = None
        self.chunk.copy_(self.master)

    def set_lr_factor(self, factor: float) -> None:
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = self.rate * factor

    def spread(self) -> list[dist.Work]:
        """Start to bring every owner's chunk of the weight into the module's own memory."""
        return self._broadcast(self.flat)

    def gather(self) -> list[dist.Work]:
        """Stage 3: give the weight its memory back and start to fill it. Nothing where it is there already."""
        storage = self.parameter.untyped_storage()
        if storage.size():
            return []
        storage.resize_(self.parameter.numel() * self.parameter.element_size())
        self.own(self.flat).copy_(self.chunk)
        return self.spread()

    def release(self) -> None:
        """Stage 3: free the whole weight. What autograd saved of it are views: they fill again with it."""
        self.parameter.untyped_storage().resize_(0)

    # The whole, on every rank

    def assemble(self, chunk: Tensor) -> Tensor:
        """Collective: the whole, in the parameter's shape, of something of which each rank holds a chunk."""
        whole = torch.empty(self.parameter.numel(), dtype=chunk.dtype, device=chunk.device)
        self.own(whole).copy_(chunk)
        for work in self._broadcast(whole):
            work.wait()
        return whole.view(self.shape)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state: moments (sizes[place],) and the step count (); empty before the first step."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.master, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def restore(self, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a whole weight and of whole moments, each (numel,); a step count comes as it is."""
        self.master.copy_(self.own(weight))
        self.chunk.copy_(self.master)
        if self.optimizer is not None and state:
            device = self.master.device
            self.optimizer.state[self.master] = {
                key: value.clone() if value.dim() == 0 else self.own(value).clone().to(device)
                for key, value in state.items()
            }

    def _broadcast(self, flat: Tensor) -> list[dist.Work]:
        works = []
        if len(self.sizes) > 1:
            for owner, part in enumerate(torch.split(flat, self.sizes)):
                if part.numel():
                    works += _started(dist.broadcast(part, src=owner, async_op=True))
        return works


def _started(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]
