"""torch's DistributedDataParallel with torch.optim, as the field uses it: the stage 0 that others are measured against.

Parameters, gradients and moments are fp32 at every precision; bf16 and fp16 are autocast's.

Where its gradients are. With gradient_as_bucket_view DDP's reducer owns flat buckets, from its construction to its end,
and p.grad is a view of one while there is a gradient. zero_grad(set_to_none=True) drops the views, not the buckets: the
gradient's Psi fp32 elements stay. The views seen last are kept here, to claim that memory also when no p.grad exists.
They are let go before the one forward in which DDP may rebuild its buckets, the second that synchronises, since they
would keep the old ones alive. So from the build to the first backward, and from the second forward to the second
backward, the buckets are there and unclaimed: torch offers no handle to them.

With A > 1 the micro-batches before the last accumulate in ordinary p.grad tensors, copied into the buckets at the last:
until then there are two copies of the gradient.

At n = 1 DDP still issues an all-reduce a bucket and step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerobench.claims import Claims, Recipe
from zerobench.implementations.helpers import distinct, torch_states
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.terms import Category, Stage

FP32 = Recipe("fp32", "fp32", None, "fp32")


class TorchDdpEngine:
    """Collective: build, forward and backward of a step's last micro-batch."""

    def __init__(self, job: Job) -> None:
        self.module, self.micro_batches = job.module, job.micro_batches
        self.optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())
        self.ddp = DistributedDataParallel(
            job.module,
            gradient_as_bucket_view=True,
            find_unused_parameters="unused" in job.features,
            bucket_cap_mb=None if job.bucket_numel is None else job.bucket_numel * 4 / 2**20,
        )
        self._autocast = None if job.dtype == torch.float32 else (job.world.device.type, job.dtype)
        self._views: list[Tensor] = []
        self._synchronised = 0  # backward passes with a reduction so far

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        rebuilds = last and torch.is_grad_enabled() and self._synchronised == 1
        if rebuilds:
            self._views = []
        autocast: AbstractContextManager[object] = nullcontext()
        if self._autocast is not None:
            autocast = torch.autocast(self._autocast[0], dtype=self._autocast[1])
        # DDP looks at no_sync in forward: it decides there whether this micro-batch's backward reduces.
        with autocast, nullcontext() if last else self.ddp.no_sync():
            return self.ddp(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]
        if last:
            self._synchronised += 1
            self._views = [p.grad for p in self.module.parameters() if p.grad is not None]

    def step(self) -> StepReport:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport()

    def model_states(self) -> dict[Category, list[Tensor]]:
        states = torch_states(self.module, self.optimizer)
        states[Category.GRADIENT] = distinct([*self._views, *states[Category.GRADIENT]])
        return states

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        trainable = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trainable}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        named = (
            (name, self.optimizer.state.get(p, {})) for name, p in self.module.named_parameters() if p.requires_grad
        )
        return {name: {k: v for k, v in state.items() if isinstance(v, Tensor)} for name, state in named}

    def close(self) -> None:
        self._views = []
        del self.ddp


class TorchDdp:
    name = "torch-ddp"
    supports = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "bucket", "overlap", "fp16", "sgd"})
    supports |= {"tied", "frozen", "unused", "uneven", "groups", "broadcast_init"}

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        return Claims(stage=Stage.DDP, recipe=FP32, supports=self.supports, compute="autocast")

    def build(self, job: Job) -> TorchDdpEngine:
        if job.clip_norm is not None:
            raise Unsupported("torch DDP does not clip gradients itself")
        if job.loss_scale is not None:
            raise Unsupported("this adapter has no loss scale")
        return TorchDdpEngine(job)
