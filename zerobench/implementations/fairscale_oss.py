"""FairScale's OSS: a sharded optimizer beside torch's DDP (stage 1) or FairScale's ShardedDataParallel (stage 2).

What FairScale documents (docstrings of OSS and ShardedDataParallel, 0.4.13), and is claimed:

- OSS packs whole parameters on ranks greedily, about Psi/n each, and broadcasts them after its step.
- ShardedDDP reduces each gradient to its owner: with no_sync once a step, after the last micro-batch, so that a step
  moves 2 Psi at every A and the micro-batches before it leave whole gradients. "After loss.backward() each rank will have
  None in place of some param.grad."
- `reduce_buffer_size`, 2**23 elements by default: gradients up to it are reduced in buckets, one a destination, and
  "these buckets correspond to parameters which will not be sharded". Where the buffer holds the model no gradient is
  sharded, and fairscale-oss-sdp claims stage 1 of it; fairscale-oss-sdp-unbuffered sets 0 and claims stage 2.

Everything is fp32; bf16 is autocast's. Gradients are clipped by OSS.clip_grad_norm. ShardedDDP has a loss scale of its
own (ShardedGradScaler), which needs CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zerobench.claims import Claims
from zerobench.implementations.helpers import scale_rates, torch_states
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.implementations.torch_ddp import FP32, TorchDdp, TorchDdpEngine
from zerobench.implementations.torch_sharded import storages
from zerobench.implementations.torch_zero import TorchZeroEngine
from zerobench.terms import Category, Stage

BUFFER = 2**23
"""Elements: ShardedDataParallel's default reduce_buffer_size."""


def oss(job: Job) -> Any:
    from fairscale.optim import OSS

    return OSS(job.param_groups(), optim=job.optimizer.torch(), **job.optimizer.options())


def consolidated(module: torch.nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Collective: every state under the module's names, as OSS.consolidate_state_dict gathers them."""
    optimizer.consolidate_state_dict(recipient_rank=-1)
    states = optimizer.state_dict()["state"]
    optimizer._all_states = []  # the copy that consolidation leaves behind is this reading's, not the training's
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {n: {k: v for k, v in states.get(i, {}).items() if isinstance(v, Tensor)} for i, n in enumerate(order)}


class OssDdpEngine(TorchZeroEngine):
    """torch's ZeroRedundancyOptimizer came from OSS: what differs is how states are gathered."""

    def _optimizer(self, job: Job) -> Optimizer:
        return oss(job)  # type: ignore[no-any-return]

    def save(self, path: Path) -> None:
        self.optimizer.consolidate_state_dict(0)
        TorchDdpEngine.save(self, path)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return consolidated(self.module, self.optimizer)


class OssSdpEngine:
    """Collective: build, forward, the last backward, step, and the full_*."""

    def __init__(self, job: Job, settings: Mapping[str, int]) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel

        self.module, self.micro_batches = job.module, job.micro_batches
        self.clip_norm, self.world = job.clip_norm, job.world
        self.optimizer = oss(job)
        self.model = ShardedDataParallel(job.module, self.optimizer, **settings)
        self._cast = None if job.precision == "fp32" else job.dtype

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        autocast: AbstractContextManager[object] = nullcontext()
        if self._cast is not None:
            autocast = torch.autocast(self.world.device.type, dtype=self._cast)
        with autocast, nullcontext() if last else self.model.no_sync():
            return self.model(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with nullcontext() if last else self.model.no_sync():
            (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        norm = None if self.clip_norm is None else float(self.optimizer.clip_grad_norm(self.clip_norm))
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return StepReport(grad_norm=norm)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def model_states(self) -> dict[Category, list[Tensor]]:
        states = torch_states(self.module, self.optimizer.optim)  # the local optimizer has this rank's states
        return states | {Category.GRADIENT: storages([p.grad for p in self.module.parameters() if p.grad is not None])}

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        """The owner's: nobody else has the mean."""
        out = {}
        for name, p in self.module.named_parameters():
            if p.requires_grad:
                out[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                dist.broadcast(out[name], self.optimizer._param_to_rank[p])
        return out

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return consolidated(self.module, self.optimizer)

    def save(self, path: Path) -> None:
        self.optimizer.consolidate_state_dict(0)
        if self.world.rank == 0:
            states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(states, path / "state.pt")
        dist.barrier()

    def load(self, path: Path) -> None:
        states = torch.load(path / "state.pt", map_location=self.world.device, weights_only=True)
        self.module.load_state_dict(states["module"])
        self.optimizer.load_state_dict(states["optimizer"])

    def close(self) -> None:
        del self.model


class OssDdp(TorchDdp):
    name = "fairscale-oss-ddp"
    imports = ("fairscale.optim", "fairscale.nn.data_parallel")

    def unavailable(self) -> str | None:
        missing = importlib.util.find_spec("fairscale") is None
        return "FairScale is not installed; pip install 'zerobench[fairscale]'" if missing else None

    def claims(self, job: Job) -> Claims:
        return Claims(stage=Stage.OPTIMIZER, recipe=FP32, supports=self.supports, volume="3", compute="autocast")

    def build(self, job: Job) -> Any:
        return OssDdpEngine(job)


class OssSdp(OssDdp):
    name = "fairscale-oss-sdp"
    settings: Mapping[str, int] = MappingProxyType({})
    supports = TorchDdp.supports - {"bucket", "fp16", "loss_scaling", "overflow_skip", "simulable"}

    def claims(self, job: Job) -> Claims:
        psi = sum(p.numel() for p in job.module.parameters())
        whole = self.settings.get("reduce_buffer_size", BUFFER) >= psi
        stage = Stage.OPTIMIZER if whole else Stage.GRADIENT
        supports = self.supports - ({"overlap"} if whole else set())  # a bucket travels when it is full
        return Claims(stage, FP32, supports, volume="2", compute="autocast", reduce_each=False)

    def build(self, job: Job) -> Any:
        if job.loss_scale is not None:
            raise Unsupported("ShardedGradScaler needs CUDA")
        return OssSdpEngine(job, self.settings)


class OssSdpUnbuffered(OssSdp):
    name = "fairscale-oss-sdp-unbuffered"
    settings = MappingProxyType({"reduce_buffer_size": 0})
