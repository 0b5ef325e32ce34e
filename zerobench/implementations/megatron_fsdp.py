"""Megatron-FSDP: `fully_shard_model` and `fully_shard_optimizer` around torch.optim, `zero_dp_strategy` 0 to 3.

What it documents (README of megatron-fsdp 0.6.1, docstrings of fully_shard_model, fully_shard_optimizer and
MegatronFSDP), and is claimed:

- Strategy 0 shards nothing, 1 the optimizer's states and main weights, 2 the gradients too, 3 the parameters too: the
  paper's stages, with the paper's traffic.
- `main_params_dtype` is fp32 by default: main weights beside the weights at every precision, in fp32 a copy. They are
  made from the weights, which the caller has cast. `main_grads_dtype` is the weights' own by default (an option).
- Gradients of strategies 2 and 3 are reduced in every backward; those of 0 and 1 once a step, "successive in-place
  gradient buffer reductions" corrupt them. So `set_model_auto_sync` is on for the last micro-batch, and
  caller_accumulation is claimed of 2 and 3 only.
- `fsdp_unit_modules`, "required if 1, 2, or 3", are classes. Here those of the job's units and of the root's other
  children (none with the option units=false). A root's own parameters are in no unit, and stay gathered.
- A unit's buffer is padded to a multiple of n rows of its widest parameter. There is no bucket size in
  this API.

Gradients are averaged by PREMUL_SUM, which gloo has not, or with `average_in_collective` by AVG, which it has: so that is
on; it asks for the size of the experts' mesh, so there is one. fully_shard_optimizer rather than fully_shard, which makes
one group of all parameters. The library has no clipping and no loss scale of its own. Checkpoints are
torch.distributed.checkpoint's, as the README has them.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from zerobench.claims import Claims, Recipe
from zerobench.implementations.cuda_stand_in import SHIMMED, cuda_on_cpu
from zerobench.implementations.helpers import by_streams, scale_rates
from zerobench.implementations.pieces import joined, joined_states
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.implementations.torch_sharded import storages
from zerobench.terms import Category, Stage

SUPPORTS = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "sgd", "uneven", "tied"})
SUPPORTS |= {"frozen", "unused", "groups", "schedule", "checkpoint", "reshard"}


def unit_types(job: Job) -> tuple[type[nn.Module], ...]:
    """Classes of the job's units, and of the root's children that have parameters in none; none without the option."""
    if not job.options.get("units", True):
        return ()
    inside = {id(p) for unit in job.units for p in unit.parameters()}
    others = [m for m in job.module.children() if any(id(p) not in inside for p in m.parameters())]
    return tuple(dict.fromkeys(type(m) for m in (*job.units, *others)))


class MegatronFsdpEngine:
    """Collective: all but model_states and set_lr_factor."""

    def __init__(self, job: Job, stage: Stage) -> None:
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

        logging.getLogger("megatron_fsdp").setLevel(logging.ERROR)  # it warns at every step of strategies 0 and 1
        self.stage, self.micro_batches = stage, job.micro_batches
        if job.precision != "fp32":
            job.module.to(job.dtype)
        n = job.world.size
        gradients = torch.float32 if job.options.get("main_grads_dtype") == "fp32" else None
        with cuda_on_cpu():
            mesh = init_device_mesh(job.world.device.type, (n, 1), mesh_dim_names=("dp", "tp"))
            self.model = fully_shard_model(
                job.module,
                device_mesh=mesh,
                expt_device_mesh=mesh,
                dp_shard_dim="dp",
                tp_dim="tp",
                fsdp_unit_modules=list(unit_types(job)),
                zero_dp_strategy=int(stage),
                device=job.world.device,
                mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=gradients),
                overlap_grad_reduce=bool(job.options.get("overlap", True)),
                average_in_collective=True,
            )
            # The module's parameters are the library's own by now, under the same names.
            optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())
            self.optimizer = fully_shard_optimizer(optimizer)
        self.buffers = self.model.param_and_grad_buffer
        self._named = dict(self.buffers.optimizer_named_parameters)

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        with cuda_on_cpu():
            self.model.set_model_auto_sync(last)
            return self.model(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with cuda_on_cpu():
            (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        with cuda_on_cpu():
            self.optimizer.step()
            self.optimizer.zero_grad()
        return StepReport()

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def model_states(self) -> dict[Category, list[Tensor]]:
        groups = self.buffers.parameter_groups
        weights = [group.model_weight_buffer.data for group in groups if group.model_weight_buffer]
        masters = [group.main_weight_buffer.data for group in groups if group.main_weight_buffer]
        gradients = [group.main_grad_buffer.data for group in groups if group.main_grad_buffer]
        gradients += [p.grad for p in self._named.values() if p.grad is not None]
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: storages(weights or list(self.model.raw_param.values())),
            Category.GRADIENT: storages(gradients),
            Category.OPTIMIZER: storages([*masters, *states]),
        }

    def _whole(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Strategy 0's are whole already; DTensor.full_tensor() takes shards to be even, which these are not."""
        if not self.stage:
            return {name: piece.view(self._named[name].shape).clone() for name, piece in pieces.items()}
        return {name: joined(piece).view(self._named[name].shape) for name, piece in pieces.items()}

    def full_parameters(self) -> dict[str, Tensor]:
        return self._whole({name: _local(p) for name, p in self._named.items()})

    def full_gradients(self) -> dict[str, Tensor]:
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        return self._whole(
            {name: torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad) for name, p in trainable.items()}
        )

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        states = {}
        for name, p in trainable.items():
            state = self.optimizer.state.get(p, {})
            states[name] = {k: _local(v) for k, v in state.items() if isinstance(v, Tensor)}
        return joined_states(states, {name: p.shape for name, p in trainable.items()}) if self.stage else states

    def _checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, path: Path) -> None:
        with cuda_on_cpu():
            dcp.save(self._checkpoint(), checkpoint_id=path)  # type: ignore[attr-defined]

    def load(self, path: Path) -> None:
        with cuda_on_cpu():
            states = self._checkpoint()
            # Its tensors load by weights only, its index is a pickle: this run's own save wrote it, no other is read.
            dcp.load(states, checkpoint_id=path)  # type: ignore[attr-defined]
            self.model.load_state_dict(states["model"], strict=False)
            self.optimizer.load_state_dict(states["optimizer"])

    def close(self) -> None:
        del self.model, self.optimizer, self.buffers


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def padding(job: Job, stage: Stage) -> int:
    """Elements a rank beyond Psi, or beyond Psi / n where all is sharded; an upper bound, a few elements from exact.

    In a unit, parameters that are not a multiple of its chunk begin at one; the unit is padded to a multiple of n
    chunks. A chunk is a row of the widest parameter, or the least common multiple of the rows of those that do not fit.
    """
    names = {id(p): name for name, p in job.module.named_parameters()}
    units: dict[str, int] = {}
    kinds = unit_types(job)
    for number, unit in enumerate(m for m in job.module.modules() if isinstance(m, kinds)):
        for p in unit.parameters():
            units.setdefault(names[id(p)], number)
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, p in job.module.named_parameters():
        groups.setdefault((units.get(name, -1), p.requires_grad), []).append(p)
    n = job.world.size if stage else 1
    total = 0
    for members in groups.values():
        numel = sum(p.numel() for p in members)
        chunk = _chunk(members)
        laid = sum(p.numel() if p.numel() < chunk else _up(p.numel(), chunk) for p in members)
        extra = _up(laid, n * chunk if stage else 1) - numel
        total += -(-extra // n) + 1 if stage is Stage.PARAMETER else extra
    return total


def _chunk(members: list[Tensor]) -> int:
    rows = [(math.prod(p.shape[1:]), p.numel()) for p in members]
    chunk = max(row for row, _ in rows)
    for row, numel in sorted(rows, key=lambda pair: -pair[0]):
        fits = row == chunk or numel < chunk or (chunk % row == 0 and numel % chunk == 0)
        chunk = chunk if fits else math.lcm(chunk, row)
    return chunk


def _up(numel: int, grain: int) -> int:
    return -(-numel // grain) * grain


class MegatronFsdp0:
    name = "megatron-fsdp-0"
    imports = ("megatron_fsdp",)
    shimmed = SHIMMED
    stage = Stage.DDP
    supports = SUPPORTS

    def unavailable(self) -> str | None:
        missing = importlib.util.find_spec("megatron_fsdp") is None
        return "Megatron-FSDP is not installed; pip install 'zerobench[megatron-fsdp]'" if missing else None

    def claims(self, job: Job) -> Claims:
        low = job.precision
        return Claims(
            stage=self.stage,
            recipe=Recipe(low, job.options.get("main_grads_dtype", low), "fp32", "fp32"),
            supports=by_streams(job, self.supports),
            padding_numel=padding(job, self.stage),
            master_from="parameter",
        )

    def build(self, job: Job) -> MegatronFsdpEngine:
        if job.loss_scale is not None or job.precision == "fp16":
            raise Unsupported("this adapter has no loss scale")
        return MegatronFsdpEngine(job, self.stage)


class MegatronFsdp1(MegatronFsdp0):
    name = "megatron-fsdp-1"
    stage = Stage.OPTIMIZER


class MegatronFsdp2(MegatronFsdp0):
    name = "megatron-fsdp-2"
    stage = Stage.GRADIENT
    supports = SUPPORTS | {"caller_accumulation"}


class MegatronFsdp3(MegatronFsdp2):
    name = "megatron-fsdp-3"
    stage = Stage.PARAMETER
