"""DeepSpeed's ZeRO, stages 0 to 3: `deepspeed.initialize` around torch.optim, torch's own collectives.

What DeepSpeed documents (docs.deepspeed.ai, "ZeRO" and "Configuration JSON"; runtime/zero/config.py), and is claimed:

- Stage 1 partitions the optimizer's states, 2 the gradients too, 3 the parameters too. Stages 1 to 3 keep an fp32
  master of their part of the flat weights at every precision, made from the weights as cast to it: at fp32 a copy.
- `use_multi_rank_bucket_allreduce`, on by default: stages 1 and 2 all-reduce buckets where they would reduce to owners.
  So a step moves 3 Psi at stage 1, and (2 A + 1) Psi at stage 2; without it (deepspeed-2-reduce) A + 1.
- A flat group is padded to a multiple of 2 n elements at stages 1 and 2; at stage 3 each parameter to one of n.
- Stage 3 gathers a submodule for its forward and again for its backward.

Set here because the defaults are not what a scenario asks for: `gradient_clipping`, 1.0 by default in 0.19, is what the
job says, 0.0 for none; buckets are the job's (5e8 elements by default); at stage 3 `stage3_param_persistence_threshold`
and `stage3_max_reuse_distance` are 0, so that no parameter is too small to be sharded or too soon needed to be freed,
and the prefetch is a bucket. deepspeed-2-defaults says none of it.

Gradients are held as the library holds them: slices of whole gradients, whose whole storages stay alive and are claimed.
A loss scale exists for fp16 only. Checkpoints are read by as many ranks as wrote them (others need a conversion).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zerobench.claims import Claims, Recipe
from zerobench.implementations.helpers import by_streams, scale_rates
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.implementations.torch_sharded import storages
from zerobench.terms import Category, Stage

SUPPORTS = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "caller_accumulation", "sgd", "uneven"})
SUPPORTS |= {"frozen", "unused", "groups", "schedule", "tied", "clipping", "checkpoint", "broadcast_init"}


OPTIONS = ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "reduce_bucket_size", "memory_efficient_linear")
"""Options that a suite may set, as `zero_optimization` has them; and `grad_accum_dtype`, of `data_types`."""


def config(job: Job, stage: int, more: Mapping[str, Any], *, defaults: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for a job; with `defaults` what the library needs to be told, and no more."""
    zero: dict[str, Any] = {"stage": stage, **more}
    out = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.micro_batches,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if job.precision != "fp32":
        out["bf16"] = {"enabled": True}
    if not defaults or job.clip_norm is not None:
        out["gradient_clipping"] = job.clip_norm or 0.0
    if not defaults:
        overlap = job.options.get("overlap")
        zero |= {} if overlap is None else {"overlap_comm": bool(overlap)}
        zero |= {} if job.bucket_numel is None else {"reduce_bucket_size": job.bucket_numel}
        if stage == Stage.PARAMETER:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
            zero |= {} if job.bucket_numel is None else {"stage3_prefetch_bucket_size": job.bucket_numel}
    zero |= {name: job.options.get(name) for name in OPTIONS if name in job.options}
    if "grad_accum_dtype" in job.options:
        out["data_types"] = {"grad_accum_dtype": job.options.get("grad_accum_dtype")}
    return out


class DeepSpeedEngine:
    """Collective: all but model_states and set_lr_factor."""

    def __init__(self, job: Job, stage: int, settings: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        if (found := get_accelerator().device_name().partition(":")[0]) != job.world.device.type:
            raise Unsupported(f"DeepSpeed chose {found!r} when it was imported; DS_ACCELERATOR={job.world.device.type}")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        os.environ.setdefault("LOCAL_RANK", str(job.world.device.index or 0))  # it insists; its own launcher sets it
        self.library, self.stage, self.module = deepspeed, stage, job.module
        deepspeed.init_distributed(dist_backend=job.world.backend, auto_mpi_discovery=False, verbose=False)
        optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())
        self.engine = deepspeed.initialize(model=job.module, optimizer=optimizer, config=settings)[0]
        self.zero = self.engine.optimizer
        self._named = dict(job.module.named_parameters())

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        return self.engine(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.backward(loss)

    def step(self) -> StepReport:
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if self.engine.gradient_clipping() else None
        return StepReport(not self.engine.was_step_applied(), norm)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.engine.basic_optimizer, factor)

    @property
    def states(self) -> Mapping[Any, Any]:
        """torch's state by master; another object after load_checkpoint."""
        return self.engine.basic_optimizer.state  # type: ignore[no-any-return]

    def _masters(self) -> list[Tensor]:
        """The fp32 tensors that the optimizer updates: flat parts at stages 1 to 3, at stage 0 those of a copy."""
        return [p for group in self.engine.basic_optimizer.param_groups for p in group["params"]]

    def _flat(self) -> list[Tensor]:
        """By group: this rank's part of the flat masters."""
        return list(
            self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        )

    def model_states(self) -> dict[Category, list[Tensor]]:
        own = list(self._named.values())
        ids = {id(p) for p in own}
        parameters = [p.ds_tensor if hasattr(p, "ds_tensor") else p for p in own]
        masters = self._flat() if self.stage else [p for p in self._masters() if id(p) not in ids]
        gradients = [p.grad for p in own if p.grad is not None]
        if self.stage in (1, 2):
            for kept in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
                gradients += [g for group in kept.values() for g in group or ()]
        if self.stage == 3:
            gradients.append(self.zero.grad_partitions_flat_buffer)
        states = [v for state in self.states.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: storages(parameters),
            Category.GRADIENT: storages(gradients),
            Category.OPTIMIZER: storages([*masters, *states]),
        }

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: self._full_parameter(p) for name, p in self._named.items()}

    def _full_parameter(self, p: Any) -> Tensor:
        master = self.library.utils.safe_get_full_fp32_param(p)  # None for one that is frozen, and at stage 0
        if master is None and self.stage == 3:
            with self.library.zero.GatheredParameters([p]):
                return p.detach().float().clone()  # type: ignore[no-any-return]
        return self._master(p).detach().float() if master is None else master  # type: ignore[no-any-return]

    def _master(self, p: Any) -> Any:
        """At stage 0: the fp32 copy of `p`, or `p` itself."""
        for low, high in zip(getattr(self.zero, "fp16_groups", ()), getattr(self.zero, "fp32_groups", ()), strict=True):
            for mine, master in zip(low, high, strict=True):
                if mine is p:
                    return master
        return p

    def full_gradients(self) -> dict[str, Tensor]:
        out = {}
        for name, p in self._named.items():
            if p.requires_grad:
                gradient = self.library.utils.safe_get_full_grad(p)
                out[name] = torch.zeros_like(p) if gradient is None else gradient.detach().float()
        return out

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        if not self.stage:
            return {n: {k: v for k, v in self.states[self._master(p)].items()} for n, p in trainable.items()}
        flat: dict[str, Any] = next((self.states[f] for f in self._flat() if f in self.states), {})
        whole = self.library.utils.safe_get_full_optimizer_state
        keys = [k for k, v in flat.items() if isinstance(v, Tensor) and v.numel() > 1]
        steps = {k: v for k, v in flat.items() if isinstance(v, Tensor) and v.numel() == 1}
        return {name: {**{k: whole(p, k) for k in keys}, **steps} for name, p in trainable.items()}

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        # A pickle, and the library has no other way: this run's own save wrote it, and no other is ever read.
        self.engine.load_checkpoint(str(path))
        if self.stage in (1, 2):  # else safe_get_full_optimizer_state raises until the next step
            self.zero._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.zero


class DeepSpeed0:
    name = "deepspeed-0"
    imports: tuple[str, ...] = (
        "deepspeed",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.original_muon",
        "torch.utils.cpp_extension",
    )
    stage = Stage.DDP
    settings: Mapping[str, Any] = MappingProxyType({})
    volume: str | None = None
    defaults = False
    supports = SUPPORTS | {"bucket"}

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed; pip install 'zerobench[deepspeed]'"
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            return "DeepSpeed builds an operator when it is first used, and there is no C++ compiler"
        return None

    def claims(self, job: Job) -> Claims:
        low = job.precision
        master = "fp32" if self.stage or low != "fp32" else None
        return Claims(
            stage=self.stage,
            recipe=Recipe(low, job.options.get("grad_accum_dtype", low), master, "fp32"),
            supports=by_streams(job, self.supports) if self.overlaps(job) else self.supports,
            padding_numel=padding(job, self.stage),
            volume=self.volume,
            master_from="parameter",
        )

    def overlaps(self, job: Job) -> bool:
        """What overlap_comm is, which DeepSpeed turns on by itself at stage 3 only."""
        asked = job.options.get("overlap", self.stage is Stage.PARAMETER)
        return self.stage.shards(Category.GRADIENT) and bool(asked) and not self.defaults

    def build(self, job: Job) -> DeepSpeedEngine:
        if job.loss_scale is not None or job.precision == "fp16":
            raise Unsupported("this adapter has no loss scale")
        return DeepSpeedEngine(
            job, int(self.stage), config(job, int(self.stage), self.settings, defaults=self.defaults)
        )


def padding(job: Job, stage: Stage) -> int:
    """Elements a rank beyond Psi / n: a flat group's to 2 n, or at stage 3 each parameter's to n."""
    if stage is Stage.DDP:
        return 0
    if stage is Stage.PARAMETER:
        return sum(1 for p in job.module.parameters() if p.numel() % job.world.size)
    return 2 * len(job.param_groups()) * job.world.size


class DeepSpeed1(DeepSpeed0):
    name = "deepspeed-1"
    stage = Stage.OPTIMIZER
    volume = "3"


class DeepSpeed2(DeepSpeed0):
    name = "deepspeed-2"
    stage = Stage.GRADIENT
    volume: str | None = "2*A+1"


class DeepSpeed2Reduce(DeepSpeed2):
    name = "deepspeed-2-reduce"
    settings = MappingProxyType({"use_multi_rank_bucket_allreduce": False})
    volume = None


class DeepSpeed2Defaults(DeepSpeed2):
    name = "deepspeed-2-defaults"
    defaults = True
    supports = SUPPORTS


class DeepSpeed3(DeepSpeed0):
    name = "deepspeed-3"
    stage = Stage.PARAMETER
