"""What FSDP1 and FSDP2 have in common for an engine: fp32 shards that torch.optim updates, reduced by backward itself.

With A > 1 every micro-batch is reduced and summed in the shard, as both do unless told otherwise. Checkpoints are those
of torch.distributed.checkpoint, which any number of ranks may read.

What is claimed of a shard is its whole storage: a shard may be a view of one that is padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerobench.claims import Recipe
from zerobench.implementations.helpers import distinct, scale_rates
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.terms import Category

SUPPORTS = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "fp16", "sgd", "uneven"})
SUPPORTS |= {"frozen", "unused", "groups", "schedule", "caller_accumulation", "clipping", "checkpoint", "reshard"}


def recipe(precision: str, reduce: str) -> Recipe:
    """fp32 shards at every precision; in 16 bits weights are cast before the gather, gradients travel as `reduce`."""
    if precision == "fp32":
        return Recipe("fp32", "fp32", None, "fp32")
    return Recipe("fp32", "fp32", None, "fp32", reduce=reduce, gather=precision)


def refuse(job: Job) -> None:
    """Raises Unsupported for what these adapters leave to the caller."""
    if job.loss_scale is not None:
        raise Unsupported("this adapter has no loss scale")


def replicas(job: Job) -> tuple[int, int]:
    """(replicas, ranks in a shard group) of the hybrids: 2 x n/2. Raises Unsupported unless n is even, 4 or more."""
    n = job.world.size
    if n < 4 or n % 2:
        raise Unsupported(f"hybrid sharding needs an even n of at least 4, not {n}: two replicas of at least two ranks")
    return 2, n // 2


def root_gathered_once(job: Job, copies: int = 1) -> str:
    """Claims.volume where what is in no unit stays gathered between forward and backward, and the units do not.

    A micro-batch: weights and gradients of all once, and the units' weights once more. In a hybrid of `copies` replicas
    each pass runs in groups of s = n / copies, (s-1)/s Psi, and the gradient's shard, Psi/s, is all-reduced across.
    Claims.volume counts in passes over all n ranks.
    """
    in_units = {id(p) for unit in job.units for p in unit.parameters()}
    sizes = {id(p): p.numel() for p in job.module.parameters() if p.requires_grad}
    mine = sum(numel for key, numel in sizes.items() if key in in_units)
    passes = 2 + Fraction(mine, sum(sizes.values()))
    if copies > 1:
        n, s = job.world.size, job.world.size // copies
        sent = passes * Fraction(s - 1, s) + Fraction(2 * (copies - 1), copies * s)
        passes = sent / Fraction(n - 1, n)
    return f"{passes.numerator}/{passes.denominator}*A"


class ShardedEngine(ABC):
    """Around `model`, the module as wrapped, whose parameters are shards. Collective: forward, backward, the full_*."""

    state_dict_options = StateDictOptions()

    def __init__(self, job: Job, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.micro_batches = model, optimizer, job.micro_batches
        self.clip_norm = job.clip_norm

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        return self.model(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepReport:
        norm = None if self.clip_norm is None else self.clip(self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(grad_norm=norm)

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    @abstractmethod
    def shards(self) -> list[Tensor]:
        """This rank's part of the parameters, also while they are gathered."""

    @abstractmethod
    def clip(self, clip_norm: float) -> float:
        """Clip by the library's own means; the global norm before it."""

    def model_states(self) -> dict[Category, list[Tensor]]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {
            Category.PARAMETER: self.shards(),
            Category.GRADIENT: storages(gradients),
            Category.OPTIMIZER: storages(states),
        }

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.state_dict_options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)  # type: ignore[attr-defined]

    def load(self, path: Path) -> None:
        options = self.state_dict_options
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        # Its tensors load by weights only, its index is a pickle: this run's own save wrote it, and no other is ever read.
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)  # type: ignore[attr-defined]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)

    def close(self) -> None:
        del self.model, self.optimizer


def storages(tensors: list[Any]) -> list[Tensor]:
    """The storages, each once and flat, of what this rank has of `tensors`."""
    with torch.no_grad():
        parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return distinct(
        torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in parts if t.numel()
    )
