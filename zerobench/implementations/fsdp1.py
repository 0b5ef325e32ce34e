"""torch's FSDP1, `FullyShardedDataParallel`: stage 3, each unit's parameters flattened and cut into n equal parts.

What torch documents, and is claimed. FULL_SHARD gathers a unit's weights for forward, frees them, and gathers them
again for backward; those of the root it does not free in between (a comment in _post_forward_reshard says why), so that
their share of Psi is gathered once. SHARD_GRAD_OP keeps all from forward to backward and shards them outside
computation: stage 3's memory at rest with stage 2's traffic. HYBRID_SHARD is FULL_SHARD within a node, here within a
half of the ranks, replicated across.

Flat parameters are padded to a multiple of n; with use_orig_params, which the field has and which keeps the names, each
parameter in them also begins at a multiple of 16 bytes of the dtype that is gathered.

Mixed precision as PyTorch's FSDP recipes have it (bfSixteen in llama-cookbook): weights, compute and reduction in
16 bits. Inputs are not cast here, since a module casts its own (torch's default would round the targets too).
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from zerobench.claims import Claims
from zerobench.implementations.helpers import by_streams
from zerobench.implementations.protocol import Job
from zerobench.implementations.torch_sharded import (
    SUPPORTS,
    ShardedEngine,
    recipe,
    refuse,
    replicas,
    root_gathered_once,
    storages,
)
from zerobench.terms import Stage

ALIGNMENT = 16
"""Bytes; torch.distributed.fsdp._flat_param pads each parameter to it under use_orig_params."""


class Fsdp1Engine(ShardedEngine):
    model: FullyShardedDataParallel
    # Whole states, as FSDP1's recipes save them.
    state_dict_options = StateDictOptions(full_state_dict=True)

    def __init__(self, job: Job, strategy: ShardingStrategy, mesh: DeviceMesh | None) -> None:
        units = {id(unit) for unit in job.units}
        mixed = MixedPrecision(
            param_dtype=job.dtype,
            reduce_dtype=job.dtype,
            buffer_dtype=job.dtype,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        )
        groups = job.param_groups()
        model = FullyShardedDataParallel(
            job.module,
            sharding_strategy=strategy,
            auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: id(m) in units),
            mixed_precision=None if job.dtype == torch.float32 else mixed,
            device_id=job.world.device,
            device_mesh=mesh,
            use_orig_params=True,
        )
        # Made after wrapping, as torch asks for: with use_orig_params the same parameters are then views of shards.
        super().__init__(job, model, job.optimizer.torch()(groups, **job.optimizer.options()))

        self._shards = storages(list(model.parameters()))  # as built; in between the parameters may be gathered ones

        # torch's default is True, which on the CPU gives every state the values of the one gathered last: the views of
        # one gather buffer are not copied. The option shows it: numerics.adam fails.
        self.offload = bool(job.options.get("offload_optim_state", False))

    def shards(self) -> list[Tensor]:
        return self._shards

    def clip(self, clip_norm: float) -> float:
        return float(self.model.clip_grad_norm_(clip_norm))

    def full_parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            trainable = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainable}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        if not self.optimizer.state:  # before the first step torch would make one up
            return {name: {} for name, p in self.model.named_parameters() if p.requires_grad}
        with FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(offload_to_cpu=self.offload, rank0_only=False),
        ):
            states = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)["state"]
        return {name: {k: v for k, v in s.items() if isinstance(v, Tensor)} for name, s in states.items()}


def padding(job: Job, shards: int) -> int:
    """Elements a rank beyond Psi / shards: those for the parameters' alignment, and each unit's for equal parts."""
    align = ALIGNMENT // job.dtype.itemsize
    aligned = sum(-p.numel() % align for p in job.module.parameters())
    return math.ceil(aligned / shards) + len(job.units) + 1


class Fsdp1Full:
    name = "fsdp1-full"
    strategy = ShardingStrategy.FULL_SHARD
    gathered = False

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        return Claims(
            stage=Stage.PARAMETER,
            recipe=recipe(job.precision, job.precision),
            supports=by_streams(job, SUPPORTS),
            padding_numel=padding(job, job.world.size),
            volume=None if self.gathered else root_gathered_once(job),
            gathered=self.gathered,
        )

    def build(self, job: Job) -> Fsdp1Engine:
        refuse(job)
        return Fsdp1Engine(job, self.strategy, None)


class Fsdp1GradOp(Fsdp1Full):
    name = "fsdp1-grad-op"
    strategy = ShardingStrategy.SHARD_GRAD_OP
    gathered = True


class Fsdp1Hybrid(Fsdp1Full):
    name = "fsdp1-hybrid"
    strategy = ShardingStrategy.HYBRID_SHARD

    def claims(self, job: Job) -> Claims:
        copies, shards = replicas(job)
        volume = root_gathered_once(job, copies)
        return replace(super().claims(job), padding_numel=padding(job, shards), volume=volume, shard_size=shards)

    def build(self, job: Job) -> Fsdp1Engine:
        refuse(job)
        mesh = init_device_mesh(job.world.device.type, replicas(job), mesh_dim_names=("replicate", "shard"))
        return Fsdp1Engine(job, self.strategy, mesh)
