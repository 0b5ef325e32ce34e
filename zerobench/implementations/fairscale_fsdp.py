"""FairScale's FullyShardedDataParallel: stage 3, each unit's parameters flattened and cut into n equal parts.

What FairScale documents (docstrings of FullyShardedDataParallel and auto_wrap, 0.4.13), and is claimed:

- `reshard_after_forward`: a unit's weights are freed after its forward and gathered again for its backward. The root's
  are not, by default (`disable_reshard_on_root`: "needed immediately for the backward pass"), so that their share of
  Psi is gathered once. Without it (fairscale-fsdp-grad-op) all are kept: stage 3's memory at rest, 2 A Psi a step.
- `mixed_precision`: "a (sharded) master copy of the model weights will be maintained in FP32", gathered and reduced in
  16 bits, here in `compute_dtype`. The root casts fp32 inputs to fp16 whatever that is; a module here casts its own.
- Accumulation "can be done without" no_sync, with more traffic: every micro-batch is reduced. By its shape alone a
  parameter of one element is not told from its shard, and what is summed of its gradient is then reduced once more.
- `flatten_parameters` makes one parameter of a unit's, so that they share a group and `requires_grad` (an assertion).
  A job with parameter groups or frozen parameters is not flattened; each parameter is then padded to a multiple of n.
- A whole state is gathered by `state_dict` and `gather_full_optim_state_dict`, and cut again for as many ranks as there
  are. The optimizer's "state is not modified": yet Adam's step counts become numbers, which torch's Adam refuses.
- With activation checkpointing it is "strongly encouraged to use `checkpoint_wrapper`", not torch's `checkpoint`. In
  torch's, without reentry, a unit is left in its forward, or without its weights. The module's own choice stays.

`bucket_cap_mb` is 0: small gradients would share a buffer, in whole megabytes, more than most models here weigh; and it
is reduced as a matrix, which NCCL takes and gloo does not. A unit's gradient is reduced by itself, and no bucket is
claimed. `overlap` chooses the process group that reduces, as the argument's documentation says.

FairScale asks for CUDA streams by name: on the CPU it runs within a stand-in for CUDA, and nothing else is changed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobench.claims import Claims
from zerobench.implementations.cuda_stand_in import SHIMMED, cuda_on_cpu
from zerobench.implementations.helpers import by_streams, scale_rates
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.torch_sharded import SUPPORTS, recipe, refuse, root_gathered_once, storages
from zerobench.terms import Category, Stage


def flattened(job: Job) -> bool:
    """Whether a unit's parameters can be one: they share a group, and all are trained."""
    return not job.optimizer.groups and all(p.requires_grad for p in job.module.parameters())


def padding(job: Job) -> int:
    """Elements a rank beyond Psi / n: each flat parameter, or each parameter, is padded to a multiple of n."""
    return len(job.units) + 1 if flattened(job) else len(list(job.module.parameters()))


class FairscaleFsdpEngine:
    """Collective: all but model_states and set_lr_factor."""

    def __init__(self, job: Job, *, reshard: bool) -> None:
        self.micro_batches, self.clip_norm, self.world = job.micro_batches, job.clip_norm, job.world
        self._names = {name: p.requires_grad for name, p in job.module.named_parameters()}
        groups = job.param_groups()
        with cuda_on_cpu():
            self.model = _wrap(job, reshard=reshard)
            self._parts = _parts(self.model)
        # Made after wrapping, as FairScale asks for: where nothing is flattened the same parameters are then shards.
        parameters = self.model.parameters() if flattened(job) else groups
        self.optimizer = job.optimizer.torch()(parameters, **job.optimizer.options())

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        with cuda_on_cpu():
            return self.model(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with cuda_on_cpu():
            (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        norm = None
        if self.clip_norm is not None:
            with cuda_on_cpu():
                norm = float(self.model.clip_grad_norm_(self.clip_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(grad_norm=norm)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def model_states(self) -> dict[Category, list[Tensor]]:
        own = list(self.model.parameters())  # outside of forward and backward these are the fp32 shards
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: storages(own),
            Category.GRADIENT: storages([p.grad for p in own if p.grad is not None]),
            Category.OPTIMIZER: storages(states),
        }

    def full_parameters(self) -> dict[str, Tensor]:
        with cuda_on_cpu(), self.model.summon_full_params(volatile=True):
            found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {name: found[name] for name in self._names}

    def full_gradients(self) -> dict[str, Tensor]:
        shards = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in self._parts}
        return self._trainable({name: t for p, shard in shards.items() for name, t in self._whole(p, shard).items()})

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Gathered here, since what `gather_full_optim_state_dict` does to the optimizer is for `save` to show."""
        out: dict[str, dict[str, Tensor]] = {name: {} for name in self._names}
        for p in self._parts:
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    whole = dict.fromkeys(out, value) if value.dim() == 0 else self._whole(p, value)
                    for name, _, _ in self._parts[p]:
                        out[name][key] = whole[name]
        return self._trainable(out)

    def _whole(self, p: Tensor, shard: Tensor) -> dict[str, Tensor]:
        """All ranks' shards (of the shape of p's) as the parameters that p is made of, by name."""
        mine = shard.detach().reshape(-1)
        flat = mine.new_empty(self.world.size * mine.numel())
        dist.all_gather_into_tensor(flat, mine.contiguous())
        out, start = {}, 0
        for name, shape, numel in self._parts[p]:
            out[name] = flat[start : start + numel].view(shape)
            start += numel
        return out

    def _trainable(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name, trained in self._names.items() if trained}

    def save(self, path: Path) -> None:
        with cuda_on_cpu():
            states = {"module": self.model.state_dict()}
            states["optimizer"] = self.model.gather_full_optim_state_dict(self.optimizer)
        if self.world.rank == 0:
            torch.save(states, path / "state.pt")
        dist.barrier()

    def load(self, path: Path) -> None:
        states = torch.load(path / "state.pt", map_location=self.world.device, weights_only=True)
        with cuda_on_cpu():
            self.model.load_state_dict(states["module"])
            self.optimizer.load_state_dict(self.model.get_shard_from_optim_state_dict(states["optimizer"]))

    def close(self) -> None:
        del self.model, self.optimizer, self._parts


def _wrap(job: Job, *, reshard: bool) -> Any:
    """The root and each unit in a wrapper of its own."""
    from fairscale.internal.parallel import ProcessGroupName
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from fairscale.nn.wrap import auto_wrap, enable_wrap

    units = {id(unit) for unit in job.units}
    mixed = job.dtype != torch.float32
    overlap = bool(job.options.get("overlap", True))

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        return recurse or module_is_root or id(module) in units

    with enable_wrap(
        auto_wrap_policy=policy,
        wrapper_cls=FullyShardedDataParallel,
        process_group_reduce_scatter=ProcessGroupName.reduce_scatter if overlap else ProcessGroupName.default,
        reshard_after_forward=reshard,
        flatten_parameters=flattened(job),
        mixed_precision=mixed,
        compute_dtype=job.dtype if mixed else None,
        bucket_cap_mb=0,
        compute_device=job.world.device,
    ):
        return auto_wrap(job.module)


def _parts(model: Any) -> dict[Tensor, list[tuple[str, torch.Size, int]]]:
    """What each sharded parameter is made of, in order: name, shape and elements, as `local_metadata_dict` tells."""
    wrappers = [module for module in model.modules() if isinstance(module, type(model))]
    out = {}
    for wrapper, told in zip(wrappers, model.local_metadata_dict()["param_metadata"], strict=True):
        path = f"{told['fsdp_path']}." if told["fsdp_path"] else ""
        for p, members in zip(wrapper.params, told["params"].values(), strict=True):
            names = [path + name for name in members["names"]]
            out[p] = list(zip(names, members["shapes"], members["numels"], strict=True))
    return out


class FairscaleFsdp:
    name = "fairscale-fsdp"
    shimmed = SHIMMED
    imports = ("fairscale.nn.data_parallel", "fairscale.nn.wrap")
    gathered = False

    def unavailable(self) -> str | None:
        missing = importlib.util.find_spec("fairscale") is None
        return "FairScale is not installed; pip install 'zerobench[fairscale]'" if missing else None

    def claims(self, job: Job) -> Claims:
        return Claims(
            stage=Stage.PARAMETER,
            recipe=recipe(job.precision, job.precision),
            supports=by_streams(job, SUPPORTS),
            padding_numel=padding(job),
            volume=None if self.gathered else root_gathered_once(job),
            gathered=self.gathered,
        )

    def build(self, job: Job) -> FairscaleFsdpEngine:
        refuse(job)
        return FairscaleFsdpEngine(job, reshard=not self.gathered)


class FairscaleFsdpGradOp(FairscaleFsdp):
    name = "fairscale-fsdp-grad-op"
    gathered = True
