"""Megatron-core's data parallelism: its DistributedDataParallel, with its DistributedOptimizer (stage 1) or without.

What Megatron documents (docs/source/api-guide/dist_optimizer.md; docstrings of DistributedDataParallelConfig,
OptimizerConfig and DistributedOptimizer, 0.16.1), and is claimed:

- DDP keeps the gradients of all parameters in contiguous buffers for as long as it lives, cut into buckets. With
  `use_distributed_optimizer` the parameters lie in such a buffer too, each bucket is reduce-scattered, each rank
  "owns" and updates a contiguous region of it, buckets are all-gathered: 2 Psi at every A, with `no_sync` for all
  micro-batches but the last. The gradient's buffer stays whole, so megatron-core-distopt is stage 1.
- Parameters begin at multiples of 64 elements, and buckets end at multiples of 128 and n: padding.
- `bucket_size` is honoured with `overlap_grad_reduce`, on here; it "is not safe" with parameters that get no gradient,
  so a job with such is given none.
- Weights are made 16-bit by the caller (`Float16Module` does), and the fp32 masters from them. `grad_reduce_in_fp32`
  accumulates and reduces in fp32 (an option; the library's default is the gradient's own dtype).
- A loss scale is the distributed optimizer's at every precision, and the 16-bit optimizer's; a dynamic one fp16's only.
- DistributedOptimizer refuses any optimizer but Adam and HybridDeviceOptimizer, "due to checkpointing requirements".
  The latter runs SGD as well, on the GPU for an `optimizer_offload_fraction` of 0; but it refuses fp32 shards, which
  are not leaves. So SGD is claimed in 16 bits, without checkpoints.

Groups are `config_overrides`; an empty one says that vectors decay too (the default spares them). `clip_grad` is 1.0 by
default; here it is the job's, 0.0 for none. Checkpoints are the model's and optimizer's state_dict, and
`save_parameter_state` of what is sharded.

The library finds its CUDA in a stand-in, and `Tensor.type()` names it: it knows masters by "torch.cuda.BFloat16Tensor".
"""

from __future__ import annotations

import gc
import importlib.util
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.claims import Claims, Recipe
from zerobench.implementations.cuda_stand_in import SHIMMED, cuda_on_cpu
from zerobench.implementations.helpers import scale_rates
from zerobench.implementations.pieces import joined, joined_states
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.implementations.torch_sharded import storages
from zerobench.terms import Category, Stage

SUPPORTS = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "bucket", "clipping", "checkpoint"})
SUPPORTS |= {"tied", "frozen", "unused", "groups", "schedule", "uneven", "broadcast_init", "overlap", "fp16", "sgd"}
SCALING = frozenset({"loss_scaling", "overflow_skip"})

PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Elements; _ParamAndGradBuffer pads to them with the distributed optimizer."""


def optimizer_settings(job: Job, distributed: bool) -> dict[str, Any]:
    """What OptimizerConfig is told for a job."""
    spec = job.optimizer
    settings: dict[str, Any] = {
        "optimizer": "sgd" if spec.kind == "sgd" else "adam",
        "decoupled_weight_decay": spec.kind != "adam",
        "lr": spec.lr,
        "weight_decay": spec.weight_decay,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "adam_eps": spec.eps,
        "sgd_momentum": spec.momentum,
        "clip_grad": job.clip_norm or 0.0,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "params_dtype": job.dtype,
        "use_distributed_optimizer": distributed,
    }
    if distributed and spec.kind == "sgd":
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0}
    if job.loss_scale == "dynamic":
        settings |= {"initial_loss_scale": job.initial_scale, "hysteresis": 1}
    elif job.loss_scale is not None or job.precision == "fp16":
        settings["loss_scale"] = float(job.loss_scale or 1.0)
    return settings


def overrides(job: Job) -> dict[Any, Any]:
    """Of the optimizer's parameter groups, what differs from OptimizerConfig; DDP's names begin with "module."."""
    from megatron.core.optimizer.optimizer_config import ParamKey

    groups = [group for group in job.optimizer.groups or () if group.names]
    return {ParamKey(name=tuple(f"module.{name}" for name in group.names)): dict(group.options) for group in groups}


class MegatronCoreEngine:
    """Collective: build, forward and backward of a step's last micro-batch, step, the full_*, save and load."""

    def __init__(self, job: Job, distributed: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer.optimizer_config import OptimizerConfig
        from megatron.core.transformer import TransformerConfig

        self.module, self.world, self.micro_batches = job.module, job.world, job.micro_batches
        self.distributed, self.scaled = distributed, job.loss_scale is not None
        if job.precision != "fp32":
            job.module.to(job.dtype)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=bool(job.options.get("overlap", True)) and "unused" not in job.features,
            bucket_size=job.bucket_numel,
            grad_reduce_in_fp32=bool(job.options.get("grad_reduce_in_fp32", False)),
        )
        self.groups = parallel_state
        with cuda_on_cpu():
            parallel_state.initialize_model_parallel()
            shape = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)  # no transformer of its own
            self.model = DistributedDataParallel(shape, settings, job.module)
            self.model.broadcast_params()
            config = OptimizerConfig(**optimizer_settings(job, distributed))
            self.optimizer = get_megatron_optimizer(config, [self.model], config_overrides=overrides(job))

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        with cuda_on_cpu(), self._synchronised(last):
            return self.model(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with cuda_on_cpu(), self._synchronised(last):
            loss = loss / self.micro_batches
            (self.optimizer.scale_loss(loss).sum() if self.scaled else loss).backward()  # type: ignore[no-untyped-call]
            if last:
                self.model.finish_grad_sync()

    def _synchronised(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()  # type: ignore[no-any-return]

    def step(self) -> StepReport:
        """The report's loss scale is the one that this step's gradients had."""
        scale = self._scale() if self.scaled else None
        with cuda_on_cpu():
            done, norm, _ = self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()
        return StepReport(not done, norm, scale)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def _scale(self) -> float:
        return float(self.optimizer.get_loss_scale())

    def _updated(self, parameter: Tensor) -> Tensor | None:
        """What the optimizer updates for a parameter: itself, its master, or this rank's piece, where it has one."""
        if not self.distributed:
            return getattr(parameter, "main_param", parameter)
        inner = self.optimizer.chained_optimizers[0]
        if parameter not in inner.model_param_group_index_map:
            return None
        group, place = inner.model_param_group_index_map[parameter]
        return inner.optimizer.param_groups[group]["params"][place]  # type: ignore[no-any-return]

    def model_states(self) -> dict[Category, list[Tensor]]:
        own = list(self.module.parameters())
        places = {p.untyped_storage()._cdata for p in own}
        inner = self.optimizer.optimizer
        updated = [p for group in inner.param_groups for p in group["params"]]
        masters = [p for p in updated if p.untyped_storage()._cdata not in places]
        states = [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: storages(own),
            Category.GRADIENT: storages([buffer.grad_data for buffer in self.model.buffers]),
            Category.OPTIMIZER: storages([*masters, *states]),
        }

    def full_parameters(self) -> dict[str, Tensor]:
        out = {}
        for name, p in self.module.named_parameters():
            if not (self.distributed and p.requires_grad and p.dtype != torch.float32):
                out[name] = p.detach() if (updated := getattr(p, "main_param", None)) is None else updated.detach()
            else:
                piece = self._updated(p)
                out[name] = joined(torch.empty(0) if piece is None else piece.detach()).view(p.shape)
        return out

    def full_gradients(self) -> dict[str, Tensor]:
        scale = self._scale()
        out: dict[Any, Tensor] = {}
        for buffer in self.model.buffers:
            for p in buffer.params:
                gradient = p.main_grad.detach().float()
                if self.distributed:
                    gradient = joined(gradient.view(-1)[self._reduced(buffer, p)]).view(p.shape)
                out[p] = gradient / scale
        return {name: out[p] for name, p in self.module.named_parameters() if p.requires_grad}

    def _reduced(self, buffer: Any, parameter: Tensor) -> slice:
        """Of a flattened parameter, the elements whose gradient this rank has reduced: its part of the bucket."""
        first, last, _ = buffer.param_index_map[parameter]
        bucket = buffer.param_to_bucket[parameter]
        share = bucket.grad_data.numel() // self.world.size
        begin = bucket.offset + self.world.rank * share
        start = min(max(first, begin), last)
        return slice(start - first, max(start, min(last, begin + share)) - first)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        states: dict[str, Mapping[str, Any]] = {}
        for name, p in trainable.items():
            updated = self._updated(p)
            state = {} if updated is None else self.optimizer.optimizer.state.get(updated, {})
            states[name] = {k: v for k, v in state.items() if isinstance(v, Tensor) and k != "master_param"}
        if self.distributed:
            return joined_states(states, {name: p.shape for name, p in trainable.items()})
        return {name: dict(state) for name, state in states.items()}

    def save(self, path: Path) -> None:
        with cuda_on_cpu():
            if self.world.rank == 0:
                states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(states, path / "state.pt")
            if self.distributed:
                self.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
        dist.barrier()

    def load(self, path: Path) -> None:
        with cuda_on_cpu():
            states = torch.load(path / "state.pt", map_location=self.world.device, weights_only=True)
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            if self.distributed:
                self.optimizer.load_parameter_state(str(path / "distrib_optim.pt"))

    def close(self) -> None:
        del self.model, self.optimizer
        self.groups.destroy_model_parallel()


def padding(job: Job) -> int:
    """Elements by which the distributed optimizer's buffers are longer than Psi."""
    trainable = [p.numel() for p in job.module.parameters() if p.requires_grad]
    grain = math.lcm(BUCKET_ALIGNMENT, job.world.size)
    end = begin = 0
    for numel in reversed(trainable):
        end = _up(end, PARAMETER_ALIGNMENT) + numel
        if job.bucket_numel is not None and end - begin >= job.bucket_numel:
            end = begin = _up(end, grain)
    return _up(end, grain) - sum(trainable)


def _up(numel: int, grain: int) -> int:
    return -(-numel // grain) * grain


class MegatronCoreDdp:
    name = "megatron-core-ddp"
    imports = (
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.parallel_state",
        "megatron.core.transformer",
    )
    shimmed = SHIMMED
    stage = Stage.DDP

    def unavailable(self) -> str | None:
        found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
        return None if found else "Megatron-core is not installed; pip install 'zerobench[megatron-core]'"

    def claims(self, job: Job) -> Claims:
        low = job.precision
        reduced = "fp32" if job.options.get("grad_reduce_in_fp32", False) else low
        return Claims(
            stage=self.stage,
            recipe=Recipe(low, reduced, None if low == "fp32" else "fp32", "fp32"),
            supports=self.supports(low),
            padding_numel=padding(job) if self.stage else 0,
            master_from="parameter",
        )

    def supports(self, precision: str) -> frozenset[str]:
        return SUPPORTS if precision == "fp32" else SUPPORTS | SCALING

    def build(self, job: Job) -> MegatronCoreEngine:
        if job.loss_scale == "dynamic" and job.precision != "fp16":
            raise Unsupported("Megatron's dynamic loss scale is for fp16")
        return MegatronCoreEngine(job, distributed=bool(self.stage))


class MegatronCoreDistOpt(MegatronCoreDdp):
    name = "megatron-core-distopt"
    stage = Stage.OPTIMIZER

    def supports(self, precision: str) -> frozenset[str]:
        return (SUPPORTS | SCALING) - ({"sgd"} if precision == "fp32" else set())

    def build(self, job: Job) -> MegatronCoreEngine:
        if job.optimizer.kind == "sgd" and "checkpoint" in job.features:
            raise Unsupported("DistributedOptimizer has no checkpoints of SGD")
        engine = super().build(job)
        # HybridDeviceOptimizer leaves its first masters in a cycle of references: found only where Python's collector has
        # not run since, so not a finding that comes twice.
        gc.collect()
        return engine
