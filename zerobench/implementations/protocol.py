"""The plug-in API: what an implementation is given (`Job`) and what it must offer (`Implementation`, `Engine`).

torch stands in annotations only, so that `import zerobench` stays light. Helpers that need torch are in `helpers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zerobench.claims import Claims, OptimizerSpec
from zerobench.terms import Category

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Unsupported(Exception):
    """Raised by `Implementation.build` for a job that it cannot do: the case is skipped, with this reason."""


@dataclass(frozen=True)
class World:
    """The ranks of this run. The default process group is initialised and stays zerobench's."""

    rank: int
    size: int
    device: torch.device
    backend: str


@dataclass(frozen=True)
class Job:
    """What to train, and how.

    module: fp32 on world.device, the implementation's own from now on. units: submodules that are sharded or bucketed
    as one; what is in none forms one more. precision: "fp32", "bf16" or "fp16". micro_batches: A. bucket_numel: the
    bucket that the scenario asks for, in elements, honoured by whoever supports "bucket". loss_scale: a number,
    "dynamic" (starts at initial_scale, halves on overflow) or None. features: the words that this scenario exercises.
    options: from the suite; one that `build` never read is an error.
    """

    module: nn.Module
    units: tuple[nn.Module, ...]
    world: World
    precision: str
    optimizer: OptimizerSpec
    micro_batches: int = 1
    bucket_numel: int | None = None
    clip_norm: float | None = None
    loss_scale: float | str | None = None
    initial_scale: float = 65536.0
    features: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of `precision`."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def param_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters as torch.optim takes them: one group, or the optimizer spec's, each with its overrides.

        Names that the spec's groups leave out form one more group, so that no parameter is lost.
        """
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        groups = []
        for group in self.optimizer.groups or ():
            members = [named.pop(name) for name in group.names if name in named]
            groups.append({"params": members, **group.options})
        if named or not groups:
            groups.append({"params": list(named.values())})
        return groups


@dataclass(frozen=True)
class StepReport:
    """What `step` did. Fields may be 0-dim tensors. grad_norm: global, unscaled, before clipping."""

    skipped: bool = False
    grad_norm: float | None = None
    loss_scale: float | None = None


class Engine(Protocol):
    """One engine a process trains one model. Optional methods are announced in `Claims.supports`."""

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        """`job.module(*batch)`: the micro-batch's mean loss, a scalar, unscaled. last: it closes the step."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate; with `last`, return when this rank's reduced mean gradient is in place."""
        ...

    def step(self) -> StepReport:
        """Clip, check overflow, update, gather, clear gradients."""
        ...

    def model_states(self) -> Mapping[Category, Sequence[Tensor]]:
        """The tensors this rank holds, by category: a claim, counted as numel x itemsize."""
        ...

    def full_parameters(self) -> dict[str, Tensor]:
        """Collective: every parameter, unsharded, under the module's own names, the most precise copy there is."""
        ...

    def close(self) -> None:
        """Collective, and last."""
        ...


class EngineExtras(Protocol):
    """The optional methods of an engine."""

    def full_gradients(self) -> dict[str, Tensor]: ...

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def set_lr_factor(self, factor: float) -> None:
        """Between steps: from now on every group's learning rate is `factor` times the one that its spec says."""
        ...


class Implementation(Protocol):
    """A class; zerobench makes an instance without arguments (an instance serves as well).

    It may have `shimmed`, a sentence: what it needs a stand-in for, CUDA on a CPU for example. Then every record, finding
    and report says so, and none is a verdict on the library behind it.

    It may have `imports`, names of modules: ranks import them before anything is measured. What `build` would import
    else is memory that no tensor explains, and time. Nothing is imported where it is unavailable.
    """

    name: str

    def unavailable(self) -> str | None:
        """A reason why it cannot run here, or None. Imports nothing heavy."""
        ...

    def claims(self, job: Job) -> Claims: ...

    def build(self, job: Job) -> Engine:
        """Collective. Raises `Unsupported` for what it cannot do."""
        ...


IMPLEMENTATION_METHODS = ("unavailable", "claims", "build")
ENGINE_METHODS = ("forward", "backward", "step", "model_states", "full_parameters", "close")
OPTIONAL_METHODS = {
    "full_gradients": ("full_gradients",),
    "full_optimizer_state": ("full_optimizer_state",),
    "checkpoint": ("save", "load"),
    "reshard": ("save", "load"),
    "schedule": ("set_lr_factor",),
}
"""Engine methods that a feature in `Claims.supports` announces."""
