"""torch's FSDP2, `fully_shard`: stage 3, each parameter cut along its first dimension; units and root one group each.

What torch documents, and is claimed. reshard_after_forward=True frees a group's weights after its forward and gathers
them again in backward; False keeps them; None, the default, is False for the root and True for the others, so that the
root's share of Psi is gathered once. With a 2-D mesh (replicate, shard) gradients are reduce-scattered in the shard
group and all-reduced across replicas.

A cut may be uneven, and the last rank may have nothing; in memory and on the wire each shard is padded to the largest.

Mixed precision as torchtitan has it: 16-bit weights and compute, gradients reduced in fp32. Inputs are not cast here,
since a module casts its own (torch's default would round the targets too).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

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


class Fsdp2Engine(ShardedEngine):
    def __init__(self, job: Job, mesh: DeviceMesh, reshard: bool | None) -> None:
        mixed = job.dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=job.dtype if mixed else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for module in (*job.units, job.module):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # After sharding: job.param_groups() looks the parameters up by name, and they are DTensors now.
        optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())
        super().__init__(job, job.module, optimizer)
        self._named = dict(job.module.named_parameters())

    def shards(self) -> list[Tensor]:
        # The DTensors themselves: their shards move once, where FSDP2 pads them in its first forward.
        return storages(list(self._named.values()))

    def clip(self, clip_norm: float) -> float:
        return float(_full(clip_grad_norm_(self.model.parameters(), clip_norm)))

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: _full(p.detach()) for name, p in self._named.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        return {name: _full(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trainable.items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = {name: self.optimizer.state.get(p, {}) for name, p in self._named.items() if p.requires_grad}
        return {n: {k: _full(v) for k, v in s.items() if isinstance(v, Tensor)} for n, s in states.items()}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def padding(job: Job, shards: int) -> int:
    """Elements a rank by which shards are rounded up: each holds ceil(d0 / shards) rows of a parameter of d0 rows."""
    total = 0
    for p in job.module.parameters():
        row = p.numel() // max(p.shape[0], 1)
        total += -(-p.shape[0] // shards) * row - p.numel() // shards
    return total


class Fsdp2:
    name = "fsdp2"
    reshard: bool | None = True

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        return Claims(
            stage=Stage.PARAMETER,
            recipe=recipe(job.precision, "fp32"),
            supports=by_streams(job, SUPPORTS | {"simulable"}),
            padding_numel=padding(job, job.world.size),
            gathered=self.reshard is False,
        )

    def build(self, job: Job) -> Fsdp2Engine:
        refuse(job)
        return Fsdp2Engine(job, init_device_mesh(job.world.device.type, (job.world.size,)), self.reshard)


class Fsdp2NoReshard(Fsdp2):
    name = "fsdp2-no-reshard"
    reshard = False


class Fsdp2RootDefault(Fsdp2):
    name = "fsdp2-root-default"
    reshard = None

    def claims(self, job: Job) -> Claims:
        return replace(super().claims(job), volume=root_gathered_once(job))


class Hsdp2(Fsdp2):
    name = "hsdp2"

    def claims(self, job: Job) -> Claims:
        _, shards = replicas(job)
        return replace(super().claims(job), padding_numel=padding(job, shards), shard_size=shards)

    def build(self, job: Job) -> Fsdp2Engine:
        refuse(job)
        mesh = init_device_mesh(job.world.device.type, replicas(job), mesh_dim_names=("replicate", "shard"))
        return Fsdp2Engine(job, mesh, self.reshard)
