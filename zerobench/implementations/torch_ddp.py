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

Without gradient_as_bucket_view (torch-ddp-no-views) p.grad are tensors of their own, and the buckets, as large again,
are the reducer's alone. torch documents that price and offers no handle, so nobody claims them.

At n = 1 DDP still issues an all-reduce a bucket and step.

Clipping is torch.nn.utils', the loss scale torch.amp.GradScaler. Neither talks to other ranks: gradients are whole and
the same everywhere, so is what follows from them. A checkpoint is the state_dicts, written by rank 0; loading one
brings back the learning rates that were saved, as optimizer.load_state_dict does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from zerobench.claims import Claims, Recipe
from zerobench.implementations.collectives import barrier
from zerobench.implementations.helpers import distinct, scale_rates, torch_states
from zerobench.implementations.protocol import Job, StepReport
from zerobench.terms import Category, Stage

FP32 = Recipe("fp32", "fp32", None, "fp32")


class TorchDdpEngine:
    """Collective: build, forward and backward of a step's last micro-batch."""

    def __init__(self, job: Job, *, views: bool = True) -> None:
        self.module, self.micro_batches = job.module, job.micro_batches
        self.world, self.clip_norm = job.world, job.clip_norm
        self.optimizer = self._optimizer(job)
        self._updates = 0  # steps that the scaler let through
        self.optimizer.register_step_post_hook(self._updated)
        self._static = None if job.loss_scale in (None, "dynamic") else float(job.loss_scale or 0)
        self.scaler = torch.amp.GradScaler(
            job.world.device.type, init_scale=self._static or job.initial_scale, enabled=job.loss_scale is not None
        )
        self.ddp = DistributedDataParallel(
            job.module,
            gradient_as_bucket_view=views,
            find_unused_parameters="unused" in job.features,
            bucket_cap_mb=None if job.bucket_numel is None else job.bucket_numel * 4 / 2**20,
        )
        self._keeps_views = views
        self._autocast = None if job.dtype == torch.float32 else (job.world.device.type, job.dtype)
        self._views: list[Tensor] = []
        self._synchronised = 0  # backward passes with a reduction so far

    def _optimizer(self, job: Job) -> Optimizer:
        return job.optimizer.torch()(job.param_groups(), **job.optimizer.options())  # type: ignore[no-any-return]

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
        self.scaler.scale(loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]
        if last:
            self._synchronised += 1
        if last and self._keeps_views:
            self._views = [p.grad for p in self.module.parameters() if p.grad is not None]

    def step(self) -> StepReport:
        """The report's loss scale is the one that this step's gradients had."""
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        before = self._updates
        self.scaler.step(self.optimizer)
        self.scaler.update(self._static)
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(self._updates == before, norm, scale)  # type: ignore[arg-type]

    def _clip(self) -> Tensor | None:
        """The gradient's norm, if anyone asks for it, and the gradient clipped."""
        if self.clip_norm is not None:
            return clip_grad_norm_(self.module.parameters(), self.clip_norm)
        if not self.scaler.is_enabled():
            return None
        return get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def _updated(self, *_: object) -> None:
        self._updates += 1

    def model_states(self) -> dict[Category, list[Tensor]]:
        states = torch_states(self.module, self.optimizer)
        states[Category.GRADIENT] = distinct([*self._views, *states[Category.GRADIENT]])
        return states

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        scale = self.scaler.get_scale()  # 1 without one
        trainable = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad / scale for name, p in trainable}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        named = (
            (name, self.optimizer.state.get(p, {})) for name, p in self.module.named_parameters() if p.requires_grad
        )
        return {name: {k: v for k, v in state.items() if isinstance(v, Tensor)} for name, state in named}

    def save(self, path: Path) -> None:
        if self.world.rank == 0:
            states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**states, "scaler": self.scaler.state_dict()}, path / "state.pt")
        barrier(self.world.size)

    def load(self, path: Path) -> None:
        states = torch.load(path / "state.pt", map_location=self.world.device, weights_only=True)
        self.module.load_state_dict(states["module"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.scaler.load_state_dict(states["scaler"])

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def close(self) -> None:
        self._views = []
        del self.ddp


class TorchDdp:
    name = "torch-ddp"
    views = True
    supports = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "bucket", "overlap", "fp16", "sgd"})
    supports |= {"tied", "frozen", "unused", "uneven", "groups", "schedule", "broadcast_init", "caller_accumulation"}
    supports |= {"clipping", "loss_scaling", "overflow_skip", "checkpoint", "reshard", "simulable"}

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        return Claims(stage=Stage.DDP, recipe=FP32, supports=self.supports, compute="autocast")

    def build(self, job: Job) -> TorchDdpEngine:
        return TorchDdpEngine(job, views=self.views)


class TorchDdpNoViews(TorchDdp):
    name = "torch-ddp-no-views"
    views = False
