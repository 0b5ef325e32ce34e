"""What an implementation says of itself: its dtypes (`Recipe`) and its promises (`Claims`), and what it is asked for.

Plain data, no torch: the judging side reads claims from records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from zerobench.terms import DTYPE_NBYTES, FEATURES, PRECISIONS, Stage


@dataclass(frozen=True)
class Recipe:
    """Dtypes by name; bytes follow. The default is the ZeRO paper's mixed-precision Adam: 2 + 2 + (4 + 4 + 4).

    `master` is None where the parameter is its own master. `reduce` and `gather` are the dtypes of gradients and
    weights on the wire, where they are not those in memory. `moments` are Adam's two (SGD with momentum has one).
    """

    parameter: str = "bf16"
    gradient: str = "bf16"
    master: str | None = "fp32"
    moments: str = "fp32"
    reduce: str | None = None
    gather: str | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            dtype = getattr(self, name)
            optional = name in ("master", "reduce", "gather")
            if not (dtype in DTYPE_NBYTES or (dtype is None and optional)):
                raise ValueError(f"Recipe.{name}: {dtype!r} is not a dtype; known: {', '.join(DTYPE_NBYTES)}")

    @classmethod
    @cache
    def of(cls, precision: str) -> Recipe:
        """The recipe that `precision` alone implies. In fp32 the parameter is its own master: 4 + 4 + (4 + 4)."""
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}; known: {', '.join(PRECISIONS)}")
        if precision == "fp32":
            return cls("fp32", "fp32", None, "fp32")
        return cls(precision, precision, "fp32", "fp32")


@dataclass(frozen=True)
class Claims:
    """What an implementation promises for one job. Each field is judged; see the specification.

    padding_numel: most elements a rank may hold beyond Psi or Psi/n in one category. volume: elements a step in Psi,
    as a sum of products of numbers and A ("3", "A+2"); None is the stage's own. master_from: "fp32", or "parameter"
    where the master is made from the already rounded weights. compute: "cast" or "autocast". reduce_each: stages 2-3
    reduce every micro-batch. accumulate: dtype in which micro-batches are summed. gathered: stage 3 keeps weights
    gathered between forward and backward. prefetch_units: units gathered ahead at stage 3. shard_size: ranks in a
    shard group (hybrid).
    """

    stage: Stage
    recipe: Recipe | None = None
    supports: frozenset[str] = frozenset()
    padding_numel: int = 0
    volume: str | None = None
    master_from: str = "fp32"
    compute: str = "cast"
    reduce_each: bool = True
    accumulate: str | None = None
    gathered: bool = False
    prefetch_units: int = 1
    shard_size: int | None = None

    def problems(self) -> list[str]:
        """What is wrong with these claims, one sentence each; empty when they can be judged."""
        out = []
        if not isinstance(self.stage, Stage):
            out.append(f"Claims.stage must be a zerobench.Stage, not {self.stage!r}")
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            out.append(f"Claims.recipe must be a zerobench.Recipe or None, not {self.recipe!r}")
        if not isinstance(self.supports, frozenset) or not all(isinstance(s, str) for s in self.supports):
            out.append(f"Claims.supports must be a frozenset of feature names, not {self.supports!r}")
        elif unknown := sorted(self.supports - FEATURES):
            out.append(f"Claims.supports names unknown features {unknown}; known: {', '.join(sorted(FEATURES))}")
        for name in ("padding_numel", "prefetch_units"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                out.append(f"Claims.{name} must be a whole number of at least 0, not {value!r}")
        size = self.shard_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            out.append(f"Claims.shard_size must be None or a whole number of at least 1, not {self.shard_size!r}")
        if self.volume is not None and not isinstance(self.volume, str):
            out.append(f"Claims.volume must be text such as '3' or 'A+2', or None, not {self.volume!r}")
        if self.master_from not in ("fp32", "parameter"):
            out.append(f"Claims.master_from must be 'fp32' or 'parameter', not {self.master_from!r}")
        if self.compute not in ("cast", "autocast"):
            out.append(f"Claims.compute must be 'cast' or 'autocast', not {self.compute!r}")
        if self.accumulate is not None and self.accumulate not in DTYPE_NBYTES:
            out.append(
                f"Claims.accumulate must be None or a dtype ({', '.join(DTYPE_NBYTES)}), not {self.accumulate!r}"
            )
        return out

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"stage": int(self.stage), "supports": sorted(self.supports)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Claims:
        kept = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        recipe = kept.get("recipe")
        supports = kept.get("supports", ())
        if not isinstance(supports, (list, tuple)) or not all(isinstance(name, str) for name in supports):
            raise ValueError(f"claims.supports: {supports!r} is not a list of names")
        return cls(
            **kept
            | {
                "stage": Stage(kept["stage"]),
                "supports": frozenset(supports),
                "recipe": Recipe(**recipe) if recipe else None,
            }
        )


@dataclass(frozen=True)
class ParamGroup:
    """Parameters, by the module's own names, that share options which override the optimizer's (lr, weight_decay,
    ...)."""

    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer that a scenario asks for, in torch.optim's words. kind: "adam", "adamw" or "sgd"."""

    kind: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    groups: tuple[ParamGroup, ...] | None = None

    @property
    def moments(self) -> int:
        """Elements of optimizer state a parameter, masters and step counts apart: Adam 2, SGD with momentum 1, SGD 0."""
        if self.kind == "sgd":
            return 1 if self.momentum else 0
        return 2

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the torch.optim class of this kind."""
        if self.kind == "sgd":
            return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    def torch(self) -> Any:
        """The torch.optim class of this kind, plain (not fused): on a shard it gives the same bits as on the whole."""
        import torch

        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.kind]
