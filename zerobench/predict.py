"""What ZeRO costs, on paper: the numbers behind `zerobench predict`.

Model states and their traffic only. Activations, gathered units, buckets, padding and the allocator come on top, so a
model that "fits" here is an upper bound, as in Table 2 of the ZeRO paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from zerobench import analytic
from zerobench.claims import Recipe
from zerobench.terms import DTYPE_NBYTES, Category, Collective, Stage


@dataclass(frozen=True)
class Preset:
    """A recipe that people know by name. extra: elements a parameter, of the moments' dtype, kept beside Adam's two."""

    recipe: Recipe
    about: str
    extra: int = 0


PRESETS: Mapping[str, Preset] = {
    "paper": Preset(Recipe(), "ZeRO paper: 16-bit weights and gradients, fp32 master and moments: 16 bytes"),
    "fp32": Preset(Recipe.of("fp32"), "everything in fp32, the weight is its own master: 16 bytes"),
    "megatron": Preset(Recipe(gradient="fp32"), "Megatron-LM, bf16: gradients summed and reduced in fp32: 18 bytes"),
    "megatron-fp16": Preset(
        Recipe("fp16", "fp16"), "Megatron-LM, fp16: an fp32 copy of the gradient for the update: 20 bytes", extra=1
    ),
    "deepspeed": Preset(
        Recipe(),
        "DeepSpeed stages 1 and 2: an fp32 copy of the gradient shard for the update: 20 bytes, 2 + 18/n at stage 2 "
        "(its own estimator leaves the 16-bit gradient out at stage 3: 18/n)",
        extra=1,
    ),
    "fsdp": Preset(
        Recipe("fp32", "fp32", None, "fp32", reduce="bf16", gather="bf16"),
        "FSDP2 with MixedPrecisionPolicy(param_dtype=bf16): holds fp32, sends bf16: 16 bytes",
    ),
}


@dataclass(frozen=True)
class Row:
    """One stage. Bytes and elements of one rank (exact means over ranks); traffic of one optimizer step, on a ring.

    volume: ring passes in Psi, before the factor (n-1)/n. largest_psi: the largest model whose states fit the card on n
    ranks; smallest_n: the fewest ranks (of a shard group, in a hybrid) on which this model's do, None if no number is
    enough. Both are None without a card.
    """

    stage: Stage
    nbytes: Mapping[Category, Fraction]
    volume: Fraction
    sent: Mapping[Collective, Fraction] = field(default_factory=dict)
    sent_nbytes: Fraction = Fraction(0)
    largest_psi: int | None = None
    smallest_n: int | None = None

    @property
    def total(self) -> Fraction:
        return sum(self.nbytes.values(), Fraction(0))

    @property
    def sent_numel(self) -> Fraction:
        return sum(self.sent.values(), Fraction(0))


def rows(
    psi: int,
    n: int,
    recipe: str | Recipe = "paper",
    *,
    micro_batches: int = 1,
    moments: int = 2,
    card_nbytes: int | None = None,
    gathered: bool = False,
    reduce_each: bool = True,
    shard_size: int | None = None,
) -> tuple[Row, ...]:
    """A row a stage. moments: the optimizer's (Adam 2, SGD with momentum 1, SGD 0).

    Raises ValueError for a psi, n, A or shard_size that cannot be, and for an unknown preset (with the known ones).
    """
    if psi < 1:
        raise ValueError(f"psi: at least 1 parameter, not {psi}")
    if isinstance(recipe, str):
        preset = named(recipe)
        recipe, moments = preset.recipe, moments + preset.extra
    return tuple(
        _row(stage, psi, n, recipe, micro_batches, moments, card_nbytes, gathered, reduce_each, shard_size)
        for stage in Stage
    )


def named(preset: str) -> Preset:
    """Raises ValueError, listing the presets, for an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"unknown recipe {preset!r}; known: {', '.join(PRESETS)}")
    return PRESETS[preset]


def largest_psi(nbytes: int, recipe: Recipe, stage: Stage, n: int, moments: int = 2) -> int:
    """The largest Psi with (a + b/n) Psi <= nbytes (ZeRO paper, Table 2)."""
    a, b = analytic.total_coefficients(recipe, stage, moments)
    return int(nbytes // (a + Fraction(b, n)))


def smallest_n(nbytes: int, recipe: Recipe, stage: Stage, psi: int, moments: int = 2) -> int | None:
    """The smallest n with (a + b/n) Psi <= nbytes: n >= b Psi / (nbytes - a Psi). None where no n is enough."""
    a, b = analytic.total_coefficients(recipe, stage, moments)
    room = nbytes - a * psi  # what the replicated states leave for the sharded ones
    if room < 0 or (room == 0 and b):
        return None
    return max(1, -(-b * psi // room)) if b else 1


def wire_nbytes(recipe: Recipe, kind: Collective) -> int:
    """Bytes an element of what travels by `kind`: kinds that reduce carry the gradient, the others weights."""
    if kind.reduces:
        return DTYPE_NBYTES[recipe.reduce or recipe.gradient]
    return DTYPE_NBYTES[recipe.gather or recipe.parameter]


def _row(
    stage: Stage,
    psi: int,
    n: int,
    recipe: Recipe,
    A: int,
    moments: int,
    card_nbytes: int | None,
    gathered: bool,
    reduce_each: bool,
    shard_size: int | None,
) -> Row:
    sent = analytic.sent_numel(stage, psi, n, A, gathered=gathered, reduce_each=reduce_each, shard_size=shard_size)
    # what a rank holds depends on the ranks that share a copy: in a hybrid that is the shard group
    shares = shard_size or n
    return Row(
        stage=stage,
        nbytes=analytic.state_nbytes(recipe, stage, psi, n, moments, shard_size=shard_size),
        volume=analytic.volume(stage, A, gathered=gathered, reduce_each=reduce_each),
        sent=sent,
        sent_nbytes=sum((numel * wire_nbytes(recipe, kind) for kind, numel in sent.items()), Fraction(0)),
        largest_psi=None if card_nbytes is None else largest_psi(card_nbytes, recipe, stage, shares, moments),
        smallest_n=None if card_nbytes is None else smallest_n(card_nbytes, recipe, stage, psi, moments),
    )
