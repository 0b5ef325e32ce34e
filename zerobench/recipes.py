"""Recipes that people know by name, each with its source: what a library holds a parameter, and what it sends.

A library may differ from its own recipe at one stage (`Variant`): DeepSpeed's estimator of stage 3 leaves the 16-bit
gradient out, its documentation prints for stage 2 what a stage 1 costs, its default collective for gradients is an
all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zerobench.claims import Recipe
from zerobench.terms import Collective, Stage


@dataclass(frozen=True)
class Variant:
    """What a stage of a library does otherwise; None is the preset's and the stage's own.

    extra: elements a parameter beside the moments. shards_as: the stage whose categories it shards. sends: how often a
    tensor of Psi elements goes through each kind of collective, as a sum of products of numbers and A.
    """

    recipe: Recipe | None = None
    extra: int | None = None
    shards_as: Stage | None = None
    sends: Mapping[Collective, str] | None = None


@dataclass(frozen=True)
class Cost:
    """One stage of a preset, nothing left open but `sends`: None is what the stage sends."""

    recipe: Recipe
    extra: int
    shards_as: Stage
    sends: Mapping[Collective, str] | None


@dataclass(frozen=True)
class Preset:
    """extra: elements a parameter, of the moments' dtype, kept beside Adam's two. source: where it is published."""

    name: str
    recipe: Recipe
    about: str
    source: str
    extra: int = 0
    stages: Mapping[Stage, Variant] = field(default_factory=dict)

    def at(self, stage: Stage) -> Cost:
        own = self.stages.get(stage, Variant())
        return Cost(
            own.recipe or self.recipe,
            self.extra if own.extra is None else own.extra,
            stage if own.shards_as is None else own.shards_as,
            own.sends,
        )

    def with_dtypes(self, dtypes: Mapping[str, str | None]) -> Preset:
        """The same with other dtypes, at every stage. Raises ValueError for an unknown field or dtype."""
        known = Recipe.__dataclass_fields__
        if unknown := sorted(set(dtypes) - set(known)):
            raise ValueError(f"dtype of {', '.join(unknown)}: a recipe has {', '.join(known)}")
        changes: Any = dict(dtypes)
        stages = {s: replace(v, recipe=replace(v.recipe, **changes)) if v.recipe else v for s, v in self.stages.items()}
        return replace(self, recipe=replace(self.recipe, **changes), stages=stages)


_REDUCE, _GATHER = Collective.ALL_REDUCE, Collective.ALL_GATHER
_DEEPSPEED_3 = Variant(Recipe(gradient="fp32", reduce="bf16"), extra=0)
"""18/n: 16-bit weight, fp32 master, moments and gradient; the 16-bit gradient is left out of the estimator."""

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "paper",
            Recipe(),
            "16-bit weights and gradients, fp32 master and moments: 16 bytes",
            "ZeRO paper, arXiv 1910.02054, sections 3, 5 and 7",
        ),
        Preset(
            "fp32",
            Recipe.of("fp32"),
            "everything in fp32, the weight is its own master: 16 bytes",
            "ZeRO paper's formulas; Megatron-LM docs/user-guide/features/dist_optimizer.md (fp32: 8 + 8/n)",
        ),
        Preset(
            "megatron",
            Recipe(gradient="fp32"),
            "Megatron-LM, bf16: gradients summed and reduced in fp32: 18 bytes; its distributed optimizer is stage 1",
            "Megatron-LM docs/user-guide/features/dist_optimizer.md (bf16 parameters, fp32 gradients: 6 + 12/n)",
        ),
        Preset(
            "megatron-fp16",
            Recipe("fp16", "fp16"),
            "Megatron-LM, fp16: an fp32 copy of the gradient for the update: 20 bytes",
            "Megatron-LM docs/user-guide/features/dist_optimizer.md (fp16 parameters and gradients: 4 + 16/n)",
            extra=1,
        ),
        Preset(
            "deepspeed",
            Recipe(),
            "DeepSpeed by its code: an fp32 copy of the gradient shard for the update, 2 + 18/n at stage 2, 18/n at "
            "stage 3; stages 1 and 2 all-reduce gradients by default (3 and 2 A + 1)",
            "deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, config.py",
            extra=1,
            stages={
                Stage.OPTIMIZER: Variant(sends={_REDUCE: "1", _GATHER: "1"}),
                Stage.GRADIENT: Variant(sends={_REDUCE: "A", _GATHER: "1"}),
                Stage.PARAMETER: _DEEPSPEED_3,
            },
        ),
        Preset(
            "deepspeed-docs",
            Recipe(),
            "DeepSpeed by its documentation, which has 4 + 16/n for stage 2: as if gradients were not sharded; of "
            "traffic it says nothing (the paper's is shown)",
            "DeepSpeed docs/code-docs/source/memory.rst",
            extra=1,
            stages={Stage.GRADIENT: Variant(shards_as=Stage.OPTIMIZER), Stage.PARAMETER: _DEEPSPEED_3},
        ),
        Preset(
            "fsdp",
            Recipe("fp32", "fp32", None, "fp32", reduce="bf16", gather="bf16"),
            "FSDP2 with MixedPrecisionPolicy(param_dtype=bf16): holds fp32, sends bf16: 16 bytes",
            "FSDP paper, arXiv 2304.11277; torch.distributed.fsdp.fully_shard, MixedPrecisionPolicy",
        ),
    )
}


def named(preset: str) -> Preset:
    """Raises ValueError, listing the presets, for an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"unknown recipe {preset!r}; known: {', '.join(PRESETS)}")
    return PRESETS[preset]
