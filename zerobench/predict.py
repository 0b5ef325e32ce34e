"""What ZeRO costs, on paper: the numbers behind `zerobench predict`, and a plain Python call.

>>> from zerobench.predict import rows
>>> ddp, one, two, three = rows(7_500_000_000, 64)
>>> float(two.total)  # bytes of model states a rank: 2 Psi + 14 Psi/64
16640625000.0
>>> float(two.sent_nbytes)  # bytes a rank sends in a step, on a ring
29531250000.0
>>> rows(7_500_000_000, 64, "deepspeed", card_nbytes=80 * 10**9)[2].largest_psi
35068493150

Model states and their traffic only (and the unit in use at stage 3, where it is given). Activations, buckets, padding
and the allocator come on top, so a model that "fits" here is an upper bound, as in Table 2 of the ZeRO paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from zerobench import analytic
from zerobench.claims import Recipe
from zerobench.recipes import Preset, named
from zerobench.terms import DTYPE_NBYTES, Category, Collective, Stage


@dataclass(frozen=True)
class Row:
    """One stage. Bytes and elements of one rank (exact means over ranks); traffic of one optimizer step, on a ring.

    volume: ring passes in Psi inside the group that shares a copy, before the factor (s-1)/s. unit_nbytes: stage 3, the
    gathered weights and the whole gradient of the unit in use; None where no unit was given, or below stage 3.
    largest_psi: the largest model whose states fit the card on n ranks; smallest_n: the fewest ranks (of a shard group,
    in a hybrid) on which this model's do, None if no number is enough; both beside the unit in use, and None without a
    card. least_s: see `rows`.
    """

    stage: Stage
    nbytes: Mapping[Category, Fraction]
    volume: Fraction
    sent: Mapping[Collective, Fraction] = field(default_factory=dict)
    sent_nbytes: Fraction = Fraction(0)
    unit_nbytes: Fraction | None = None
    largest_psi: int | None = None
    smallest_n: int | None = None
    least_s: Fraction | None = None

    @property
    def total(self) -> Fraction:
        return sum(self.nbytes.values(), Fraction(0))

    @property
    def sent_numel(self) -> Fraction:
        return sum(self.sent.values(), Fraction(0))

    @property
    def received_nbytes(self) -> Fraction:
        """On a ring a rank receives from one neighbour what it sends to the other: as many bytes."""
        return self.sent_nbytes


def rows(
    psi: int,
    n: int,
    recipe: str | Recipe | Preset = "paper",
    *,
    micro_batches: int = 1,
    moments: int = 2,
    card_nbytes: int | None = None,
    gathered: bool = False,
    reduce_each: bool = True,
    shard_size: int | None = None,
    unit_numel: int | None = None,
    bandwidth: Fraction | int | None = None,
) -> tuple[Row, ...]:
    """A row a stage, DDP first. Formulas and their derivation: `zerobench.analytic`; recipes: `zerobench.recipes`.

    moments: the optimizer's (Adam 2, SGD with momentum 1, SGD 0). gathered, reduce_each, shard_size: as in `Claims`.
    unit_numel: elements of the largest unit. bandwidth: bytes a second, each way; with it `least_s` is the larger of
    what a rank sends and what it receives, divided by it. That is a lower bound of a step's time and nothing else: no
    latency, no computation, every byte at full speed, no protocol that does better than a ring.

    Raises ValueError for a psi, n, A, shard_size, unit or bandwidth that cannot be, and for an unknown preset (with the
    known ones).
    """
    if psi < 1:
        raise ValueError(f"psi: at least 1 parameter, not {psi}")
    if unit_numel is not None and not 1 <= unit_numel <= psi:
        raise ValueError(f"unit: from 1 to Psi = {psi} elements, not {unit_numel}")
    if bandwidth is not None and bandwidth <= 0:
        raise ValueError(f"bandwidth: more than 0 bytes a second, not {bandwidth}")
    preset = _preset(recipe)
    claims = {"gathered": gathered, "reduce_each": reduce_each}
    out = []
    for stage in Stage:
        cost = preset.at(stage)
        held = moments + cost.extra
        unit = None
        if unit_numel is not None and stage.shards(Category.PARAMETER):
            width = sum(wire_nbytes(cost.recipe, kind) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
            unit = Fraction(unit_numel * width)
        if cost.sends is None:
            volume = analytic.volume(stage, micro_batches, **claims)
            sent = analytic.sent_numel(stage, psi, n, micro_batches, shard_size=shard_size, **claims)
        else:
            if not reduce_each and stage.shards(Category.GRADIENT):
                raise ValueError(f"recipe {preset.name} reduces every micro-batch at stage {int(stage)}")
            if shard_size not in (None, n):
                raise ValueError(
                    f"recipe {preset.name}: what stage {int(stage)} sends in shard groups is not published"
                )
            times = {kind: int(analytic.evaluate_volume(k, micro_batches)) for kind, k in cost.sends.items()}
            volume = Fraction(sum(kind.ring_passes * k for kind, k in times.items()))
            sent = analytic.sent_by(times, psi, n)
        sent_nbytes = sum((numel * wire_nbytes(cost.recipe, kind) for kind, numel in sent.items()), Fraction(0))
        room = None if card_nbytes is None else max(0, card_nbytes - int(unit or 0))
        # what a rank holds depends on the ranks that share a copy: in a hybrid that is the shard group
        shares = shard_size or n
        out.append(
            Row(
                stage=stage,
                nbytes=analytic.state_nbytes(cost.recipe, cost.shards_as, psi, n, held, shard_size=shard_size),
                volume=volume,
                sent=sent,
                sent_nbytes=sent_nbytes,
                unit_nbytes=unit,
                largest_psi=None if room is None else largest_psi(room, cost.recipe, cost.shards_as, shares, held),
                smallest_n=None if room is None else smallest_n(room, cost.recipe, cost.shards_as, psi, held),
                least_s=None if bandwidth is None else sent_nbytes / Fraction(bandwidth),
            )
        )
    return tuple(out)


def _preset(recipe: str | Recipe | Preset) -> Preset:
    if isinstance(recipe, str):
        return named(recipe)
    return Preset("own", recipe, "", "") if isinstance(recipe, Recipe) else recipe


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
