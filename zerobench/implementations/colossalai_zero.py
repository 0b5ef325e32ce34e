"""ColossalAI's LowLevelZeroOptimizer: stages 1 and 2, each parameter padded and cut into n equal parts.

What ColossalAI documents (colossalai/zero/low_level/readme.md, docstrings of LowLevelZeroOptimizer and of
LowLevelZeroPlugin, 0.5.0), and is claimed:

- "We would first pad p for it can be split by world_size": the padded copy is the weight that trains. Each rank has an
  fp32 master of its part at every precision, made from the weights as cast: at fp32 a copy.
- Gradients go to a bucket of `reduce_bucket_size` elements. "For zero1 we do all_reduce": with the all-gather of the
  weights 3 Psi a step, whole gradients kept. "For zero2, we can just do reduce-scatter": A + 1.
- Accumulation: stage 1 within `no_sync` until the last micro-batch; stage 2 "can NOT", and reduces each.
- `overlap_communication`, on by default in LowLevelZeroPlugin: gradients are reduced while backward goes on. At stage 1
  without it all are reduced when backward is over.
- "Sometimes not all params are really working": one without a gradient is not updated.
- The norm for `clip_grad_norm` is the optimizer's own (`get_grad_norm`). There is a loss scale for fp16 only, which is
  left out here.
- A checkpoint is the module's state_dict and the optimizer's, "same with DDP"; masters are made anew from the module's
  weights (`update_master_params`), as the plugin's load_unsharded_model does, for any number of ranks.

The module is cast before, as the plugin does. ColossalAI refuses a machine without CUDA or NPU: on the CPU it runs
within a stand-in for CUDA, as the accelerator that it is told to use, and nothing else is changed.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.claims import Claims, Recipe
from zerobench.implementations.cuda_stand_in import SHIMMED, cuda_on_cpu
from zerobench.implementations.helpers import by_streams, scale_rates
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.implementations.torch_sharded import storages
from zerobench.terms import Category, Stage

SUPPORTS = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "caller_accumulation", "bucket"})
SUPPORTS |= {"sgd", "uneven", "frozen", "unused", "tied", "groups", "schedule"}
SUPPORTS |= {"clipping", "checkpoint", "reshard"}


class ColossalAiEngine:
    """Collective: backward where it reduces, step, save, and the full_*."""

    def __init__(self, job: Job, stage: Stage) -> None:
        from colossalai.accelerator import set_accelerator
        from colossalai.zero.low_level import LowLevelZeroOptimizer

        self.module, self.world, self.stage = job.module.to(job.dtype), job.world, stage
        self.micro_batches, self.clips = job.micro_batches, job.clip_norm is not None
        groups = job.param_groups()
        self._trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in self._trainable.items()}
        self._order = [names[id(p)] for group in groups for p in group["params"]]
        settings: dict[str, Any] = {"overlap_communication": bool(job.options.get("overlap", True))}
        settings |= {} if job.bucket_numel is None else {"reduce_bucket_size": job.bucket_numel}
        with cuda_on_cpu():
            set_accelerator("cuda")
            self.optimizer = LowLevelZeroOptimizer(
                job.optimizer.torch()(groups, **job.optimizer.options()),
                clip_grad_norm=job.clip_norm or 0.0,
                partition_grad=stage is Stage.GRADIENT,
                **settings,
            )

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        return self.module(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        later: AbstractContextManager[object] = nullcontext()
        if not last and self.stage is Stage.OPTIMIZER:
            later = self.optimizer.no_sync()
        with cuda_on_cpu(), later:
            self.optimizer.backward(loss / self.micro_batches)

    def step(self) -> StepReport:
        with cuda_on_cpu():
            self.optimizer.step()
            norm = float(self.optimizer.get_grad_norm()) if self.clips else None
            self.optimizer.zero_grad()
        return StepReport(grad_norm=norm)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer.optim, factor)

    def model_states(self) -> dict[Category, list[Tensor]]:
        own = list(self.module.parameters())
        gradients = [p.grad for p in own if p.grad is not None]
        for group in range(self.optimizer.num_param_groups):
            for p in self._trainable.values():
                gradients += self.optimizer.get_partitioned_gradients_by_param_id(group, id(p))
        masters = list(self.optimizer.get_working_to_master_map().values())
        states = [v for state in self.optimizer.optim.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: storages(own),
            Category.GRADIENT: storages(gradients),
            Category.OPTIMIZER: storages([*masters, *states]),
        }

    def full_parameters(self) -> dict[str, Tensor]:
        masters = self.optimizer.get_working_to_master_map()
        out = {}
        for name, p in self.module.named_parameters():
            out[name] = p.detach().float()
            if id(p) in masters:
                part = masters[id(p)].detach().reshape(-1)
                whole = part.new_empty(self.world.size * part.numel())
                dist.all_gather_into_tensor(whole, part)
                out[name] = whole[: p.numel()].view(p.shape)
        return out

    def full_gradients(self) -> dict[str, Tensor]:
        with cuda_on_cpu():
            return {name: self._gradient(p) for name, p in self._trainable.items()}

    def _gradient(self, p: Tensor) -> Tensor:
        groups = range(self.optimizer.num_param_groups)
        if any(self.optimizer.get_partitioned_gradients_by_param_id(group, id(p)) for group in groups):
            return self.optimizer.get_param_grad(p).float()  # type: ignore[no-any-return]
        return torch.zeros_like(p, dtype=torch.float32)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        with cuda_on_cpu():
            states = self.optimizer.state_dict()["state"]
        found = {name: states.get(i, {}) for i, name in enumerate(self._order)}
        return {n: {k: v for k, v in found[n].items() if isinstance(v, Tensor)} for n in self._trainable}

    def save(self, path: Path) -> None:
        with cuda_on_cpu():
            states = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.world.rank == 0:
            torch.save(states, path / "state.pt")
        dist.barrier()

    def load(self, path: Path) -> None:
        states = torch.load(path / "state.pt", map_location=self.world.device, weights_only=True)
        self.module.load_state_dict(states["module"])
        with cuda_on_cpu():
            self.optimizer.update_master_params(self.module)
            self.optimizer.load_state_dict(states["optimizer"])

    def close(self) -> None:
        del self.optimizer


class ColossalAi1:
    name = "colossalai-1"
    shimmed = SHIMMED
    imports = ("colossalai.accelerator", "colossalai.zero.low_level")
    stage = Stage.OPTIMIZER
    volume: str | None = "3"

    def unavailable(self) -> str | None:
        missing = importlib.util.find_spec("colossalai") is None
        how = "pip install 'zerobench[colossalai]', then pip install --no-deps colossalai==0.5.0"
        return f"ColossalAI is not installed; {how}" if missing else None

    def claims(self, job: Job) -> Claims:
        low = job.precision
        return Claims(
            stage=self.stage,
            recipe=Recipe(low, low, "fp32", "fp32"),
            supports=by_streams(job, SUPPORTS),
            padding_numel=sum(-p.numel() % job.world.size for p in job.module.parameters()),
            volume=self.volume,
            master_from="parameter",
        )

    def build(self, job: Job) -> ColossalAiEngine:
        if job.loss_scale is not None or job.precision == "fp16":
            raise Unsupported("this adapter has no loss scale")
        return ColossalAiEngine(job, self.stage)


class ColossalAi2(ColossalAi1):
    name = "colossalai-2"
    stage = Stage.GRADIENT
    volume = None
