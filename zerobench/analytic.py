"""Bytes that a rank holds and elements that it sends, from (recipe, stage, Psi, n, A): pure, exact, the yardstick.

**Bytes held** (ZeRO paper, arXiv 1910.02054, sections 3 and 5). A parameter costs w bytes of weight, g of gradient and
K of optimizer: a master copy, unless the parameter is its own master, and the optimizer's moments. A rank of stage s
holds a category whole, or 1/n of it where `Stage.shards` says so. So every category costs a Psi + b Psi / n bytes, with
(a, b) = (0, cost) if sharded and (cost, 0) if not, and a total is their sum:

    DDP      (w + g + K) Psi               paper (2, 2, 12):  16 Psi
    stage 1  (w + g) Psi + K Psi/n                            4 Psi + 12 Psi/n
    stage 2  w Psi + (g + K) Psi/n                            2 Psi + 14 Psi/n
    stage 3  (w + g + K) Psi/n                                16 Psi/n

Where Psi mod n != 0 no rank holds exactly Psi/n; n times the value here is still what all ranks hold together, padding
apart. That is why the results are fractions. Hybrid sharding over groups of s = shard_size ranks replaces n by s.

**Elements sent** (section 7). A reduce-scatter, or an all-gather, of S elements on a ring of n: each rank passes on one
chunk of S/n in each of n - 1 rounds, so it sends S (n-1)/n: one *ring pass* over S. An all-reduce is one of each: two
passes. A step of A micro-batches needs, in tensors of Psi elements:

    DDP      one all-reduce of the gradient, after the last micro-batch
    stage 1  the gradient reduce-scattered once (each rank needs its part only), the updated weights all-gathered once
    stage 2  no rank can keep a whole gradient to sum in, so it is reduce-scattered every micro-batch; weights as in 1
    stage 3  weights all-gathered for every forward and, freed in between, again for every backward; gradients as in 2

    DDP 2    stage 1 2    stage 2 A + 1    stage 3 3 A

Two claims change that. *gathered*: stage 3 keeps the weights from forward to backward, one all-gather a micro-batch,
2 A. *not reduce_each*: the gradient is summed whole on the rank, at stage 2 or 3 too, and reduced after the last
micro-batch: 2 at stage 2, 2 A + 1 at stage 3 (A + 1 when gathered). This spares volume and costs g Psi bytes inside the
step for A > 1, which is memory.gradient_peak's business.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

from zerobench.claims import Recipe
from zerobench.terms import DTYPE_NBYTES, MODEL_STATES, Category, Collective, Stage


def optimizer_nbytes(recipe: Recipe, moments: int = 2) -> int:
    """K: optimizer bytes a parameter. moments: elements kept beside the master: Adam 2, SGD with momentum 1, SGD 0.

    A further element of the moments' dtype counts as one more: with an fp32 copy of the gradient Adam has 3.
    """
    if moments < 0:
        raise ValueError(f"moments: at least 0, not {moments}")
    master = DTYPE_NBYTES[recipe.master] if recipe.master is not None else 0
    return master + moments * DTYPE_NBYTES[recipe.moments]


def coefficients(recipe: Recipe, stage: Stage, moments: int = 2) -> dict[Category, tuple[int, int]]:
    """(a, b) of each model state: a rank holds (a + b/n) Psi bytes of it."""
    return dict(_coefficients(recipe, stage, moments))


@cache
def _coefficients(recipe: Recipe, stage: Stage, moments: int) -> tuple[tuple[Category, tuple[int, int]], ...]:
    cost = {
        Category.PARAMETER: DTYPE_NBYTES[recipe.parameter],
        Category.GRADIENT: DTYPE_NBYTES[recipe.gradient],
        Category.OPTIMIZER: optimizer_nbytes(recipe, moments),
    }
    return tuple((c, (0, cost[c]) if stage.shards(c) else (cost[c], 0)) for c in MODEL_STATES)


def total_coefficients(recipe: Recipe, stage: Stage, moments: int = 2) -> tuple[int, int]:
    """(a, b) of the three model states together."""
    each = _coefficients(recipe, stage, moments)
    return sum(a for _, (a, _) in each), sum(b for _, (_, b) in each)


def state_nbytes(
    recipe: Recipe, stage: Stage, psi: int, n: int, moments: int = 2, *, shard_size: int | None = None
) -> dict[Category, Fraction]:
    """Bytes a rank of each model state: the mean over ranks, without padding. ValueError for a bad n or group."""
    s = _group(n, shard_size)
    return {c: Fraction(psi * (a * s + b), s) for c, (a, b) in _coefficients(recipe, stage, moments)}


@lru_cache(1 << 14)
def total(
    recipe: Recipe, stage: Stage, psi: int, n: int, moments: int = 2, *, shard_size: int | None = None
) -> Fraction:
    """Bytes a rank of all model states together; see `state_nbytes`."""
    return sum(state_nbytes(recipe, stage, psi, n, moments, shard_size=shard_size).values(), Fraction(0))


def collectives(stage: Stage, A: int, *, gathered: bool = False, reduce_each: bool = True) -> dict[Collective, int]:
    """How often a step of A micro-batches sends a tensor of Psi elements through each kind of collective.

    The kinds that reduce carry the gradient, the all-gathers weights. The optimizer group of a hybrid adds the
    all-reduce across replicas: see `sent_numel`.
    """
    if A < 1:
        raise ValueError(f"A: at least 1 micro-batch, not {A}")
    if not stage.shards(Category.OPTIMIZER):
        return {Collective.ALL_REDUCE: 1}
    reductions = A if stage.shards(Category.GRADIENT) and reduce_each else 1
    gathers = A * (1 if gathered else 2) if stage.shards(Category.PARAMETER) else 1
    return {Collective.REDUCE_SCATTER: reductions, Collective.ALL_GATHER: gathers}


def volume(stage: Stage, A: int, *, gathered: bool = False, reduce_each: bool = True) -> Fraction:
    """Ring passes a step, in Psi: times (n-1)/n it is the elements that a rank sends."""
    times = collectives(stage, A, gathered=gathered, reduce_each=reduce_each)
    return Fraction(sum(kind.ring_passes * k for kind, k in times.items()))


def sent_numel(
    stage: Stage,
    psi: int,
    n: int,
    A: int = 1,
    *,
    gathered: bool = False,
    reduce_each: bool = True,
    shard_size: int | None = None,
) -> dict[Collective, Fraction]:
    """Elements that a rank sends in a step, by kind of collective, padding apart.

    Hybrid: the stage's collectives run inside groups of s ranks, and after each reduce-scatter the shard of Psi/s
    elements is all-reduced across the n/s replicas. DDP has no shard, hence no groups: shard_size changes nothing.
    """
    s = _group(n, shard_size) if stage.shards(Category.OPTIMIZER) else _group(n, None)
    times = collectives(stage, A, gathered=gathered, reduce_each=reduce_each)
    sent = sent_by(times, psi, s)
    if s < n:
        across = Collective.ALL_REDUCE
        sent[across] = times[Collective.REDUCE_SCATTER] * Fraction(psi, s) * across.wire_factor(n // s)
    return sent


def sent_by(times: Mapping[Collective, int], psi: int, n: int) -> dict[Collective, Fraction]:
    """Elements that a rank sends for tensors of Psi elements, `times` of them through each kind, on a ring of n."""
    return {kind: k * psi * kind.wire_factor(_group(n, None)) for kind, k in times.items()}


def ring_numel(psi_multiple: Fraction | int, psi: int, n: int) -> Fraction:
    """Elements that a rank sends for `psi_multiple` ring passes over Psi elements on n ranks."""
    return psi_multiple * psi * Fraction(n - 1, _group(n, None))


_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}|/[1-9][0-9]{0,8})?")


def evaluate_volume(text: str, A: int) -> Fraction:
    """The value of a claimed volume, a sum of products of numbers and A: "3", "A+2", "2*A + 1", "1.5*A", "2/3*A".

    Raises ValueError naming the part that is neither a number nor A. There is nothing else: no minus, no brackets.
    """
    result = Fraction(0)
    for product in text.split("+"):
        value = Fraction(1)
        for factor in (part.strip() for part in product.split("*")):
            if factor != "A" and not _NUMBER.fullmatch(factor):
                part = repr(factor) if factor else f"an empty part in {product.strip()!r}"
                raise ValueError(f"volume {text!r}: {part} is neither a number nor A (write sums of products: 'A+2')")
            value *= A if factor == "A" else Fraction(factor)
        result += value
    return result


class Fit(NamedTuple):
    """Bytes a parameter as a + b/n. residual: the largest distance of a point from the line, in bytes a parameter."""

    a: Fraction
    b: Fraction
    residual: Fraction


def fit(points: Mapping[int, Fraction]) -> Fit:
    """Least squares of {n: bytes a parameter and rank} over x = 1/n, exact. Raises ValueError for fewer than two n.

    With two world sizes the line goes through both and the residual says nothing; ask for three.
    """
    if len(points) < 2:
        raise ValueError(f"a line needs at least two world sizes, not {sorted(points)}")
    xs = {n: Fraction(1, n) for n in points}
    x_mean, y_mean = _mean(xs.values()), _mean(points.values())
    covariance = _mean([(xs[n] - x_mean) * (y - y_mean) for n, y in points.items()])
    b = covariance / _mean([(x - x_mean) ** 2 for x in xs.values()])
    a = y_mean - b * x_mean
    return Fit(a, b, max(abs(y - a - b * xs[n]) for n, y in points.items()))


def _mean(values: Collection[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def identify(
    a: Fraction | int,
    b: Fraction | int,
    recipe: Recipe,
    moments: int = 2,
    tolerance: Fraction = Fraction(1, 2),
) -> Stage | None:
    """The stage whose (a, b) lies nearest, if both are within `tolerance` bytes a parameter of it; else None.

    Half a byte: with 16-bit dtypes neighbouring stages are at least 2 bytes apart. Where stages cost the same (plain
    SGD in fp32 has nothing for stage 1 to shard) the lowest is returned.
    """

    def distance(stage: Stage) -> Fraction:
        stage_a, stage_b = total_coefficients(recipe, stage, moments)
        return max(abs(Fraction(a) - stage_a), abs(Fraction(b) - stage_b))

    nearest = min(Stage, key=distance)
    return nearest if distance(nearest) <= tolerance else None


def _group(n: int, shard_size: int | None) -> int:
    """Ranks that share one copy of a sharded category."""
    if n < 1:
        raise ValueError(f"n: at least 1 rank, not {n}")
    if shard_size is not None and (shard_size < 1 or n % shard_size):
        raise ValueError(f"shard_size {shard_size} does not divide n = {n}")
    return shard_size or n
