"""Medians, intervals and rank tests, in the standard library, deterministic.

What is independent decides what may be counted. Steps of one launch share clocks, placement and allocator state; 50 of
them against 50 of another launch give false alarms in most comparisons. So the unit of replication is the *launch*:
give these functions one number a launch (its median step), and pair launches that ran next to each other in time.

None of these assumes a distribution: on a shared machine a few launches take twice as long as the others, and a mean or
a Student's t is lost. `paired_ratio` looks at ratios because noise in time is multiplicative (a slower clock scales
every step), and at pairs because what changes slowly then cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from itertools import accumulate
from statistics import median

__all__ = ["Change", "Interval", "Ratio", "median", "median_interval", "paired_ratio", "rank_sum"]


@dataclass(frozen=True)
class Interval:
    """low <= true value <= high, in at least `confidence` of all repetitions."""

    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """The narrowest symmetric pair of order statistics that covers the median with at least `confidence`.

    The number of values below the median is Binomial(m, 1/2), so [x_(k), x_(m+1-k)] covers it with probability
    1 - 2 P(Binomial < k), whatever the (continuous) distribution; `confidence` of the result is that probability. None
    where even the whole range does not cover enough (m < 6 for 95 %). Source: order-statistic interval, David and
    Nagaraja, Order Statistics, section 7.1.
    """
    _require_confidence(confidence)
    ordered, m = sorted(values), len(values)
    k, covered = _narrowest(m, confidence)
    return Interval(ordered[k - 1], ordered[m - k], covered) if k else None


@cache
def _narrowest(m: int, confidence: float) -> tuple[int, float]:
    """(k, what [x_(k), x_(m+1-k)] covers) for the largest k that covers enough; k is 0 where none does."""
    best, below = (0, 0.0), 0  # below: 2**m P(Binomial < k), as a whole number
    for k in range(1, m // 2 + 1):
        below += math.comb(m, k - 1)
        covered = float(1 - Fraction(2 * below, 2**m))  # 2**m may be past any float
        if covered < confidence:
            break
        best = (k, covered)
    return best


def rank_sum(base: Sequence[float], head: Sequence[float]) -> float:
    """One-sided exact p that launches of head are as slow as these by chance; small: head is slower. Not paired.

    Wilcoxon's rank sum with mid-ranks for ties: of all ways to call len(head) of the pooled values head, the share
    whose ranks add up to at least what head's do. Exact, because at five launches no approximation holds. Source:
    Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 4.1. Raises ValueError for an empty side.
    """
    if not base or not head:
        raise ValueError("a rank sum needs at least one launch on each side")
    pooled = sorted([*base, *head])
    doubled = {v: pooled.index(v) + pooled.index(v) + pooled.count(v) + 1 for v in pooled}  # mid-ranks x 2, whole
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in head]  # by how many are chosen: sum of doubled ranks -> ways
    for value in pooled:
        for chosen in range(len(head), 0, -1):
            for total, count in ways[chosen - 1].items():
                ways[chosen][total + doubled[value]] = ways[chosen].get(total + doubled[value], 0) + count
    seen = sum(doubled[v] for v in head)
    return float(Fraction(sum(c for t, c in ways[-1].items() if t >= seen), math.comb(len(pooled), len(head))))


class Change(Enum):
    """How head compares with base, against an effect floor."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Ratio:
    """head / base over pairs of launches. ratio: the estimate. interval: what the signed ranks leave possible; None
    where there are too few pairs to leave anything out. slower, faster: one-sided exact p that there is no such change.
    """

    ratio: float
    interval: Interval | None
    slower: float
    faster: float
    pairs: int

    def change(self, floor: float) -> Change:
        """Slower or faster where the interval leaves 1 out and the estimate lies beyond `floor` (0.03 is 3 %): more
        than chance, and more than a trifle. Same where the whole interval is within the floor.

        The limits are 1 + floor and 1 / (1 + floor), so that swapping base and head swaps the answer.
        """
        if floor < 0:
            raise ValueError(f"an effect floor is at least 0, not {floor}")
        upper, lower = 1 + floor, 1 / (1 + floor)
        if self.interval is None:
            return Change.INCONCLUSIVE
        if lower <= self.interval.low and self.interval.high <= upper:
            return Change.SAME
        if self.interval.low > 1 and self.ratio > upper:
            return Change.SLOWER
        if self.interval.high < 1 and self.ratio < lower:
            return Change.FASTER
        return Change.INCONCLUSIVE


def paired_ratio(base: Sequence[float], head: Sequence[float], tail: float) -> Ratio:
    """How head compares with base, launch i of one with launch i of the other: Wilcoxon's signed ranks on log-ratios.

    tail: the most probability with which the truth may lie below the interval, and again above it. If nothing but
    chance tells the two sides of a pair apart, each log-ratio has either sign with equal chance, so the 2**m patterns
    of signs are equally likely and the p are exact whatever the distribution. The estimate is the median of the
    m (m+1) / 2 averages of two log-ratios (Hodges and Lehmann), the interval's ends are order statistics of these
    averages. Source: Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, sections 3.1 to 3.3.

    Raises ValueError for unequal lengths, no pairs, times that are not positive and finite, a tail not in (0, 1/2).
    """
    if len(base) != len(head) or not base:
        raise ValueError(f"pairs of launches, at least one; not {len(base)} and {len(head)}")
    if not all(0 < t < math.inf for t in (*base, *head)):
        raise ValueError("times must be positive and finite")
    if not 0 < tail < 0.5:
        raise ValueError(f"a tail lies between 0 and 1/2, not at {tail}")
    logs = [math.log(h / b) for b, h in zip(base, head, strict=True)]
    m = len(logs)
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(m) for j in range(i, m))
    at_most = _at_most(m)
    cut = sum(p <= tail for p in at_most)  # the end is the cut-th average from there
    interval = None
    if cut:
        low, high = averages[cut - 1], averages[-cut]
        interval = Interval(math.exp(low), math.exp(high), float(1 - 2 * at_most[cut - 1]))
    not_above, not_below = (sum(1 for a in averages if sign * a <= 0) for sign in (1, -1))
    return Ratio(math.exp(median(averages)), interval, float(at_most[not_above]), float(at_most[not_below]), m)


@cache
def _at_most(m: int) -> tuple[Fraction, ...]:
    """P(W <= w) for w = 0, 1, ..., where W sums those of the ranks 1 to m that a fair coin picks."""
    ways = [1]  # by sum
    for rank in range(1, m + 1):
        longer = [0] * rank
        ways = [a + b for a, b in zip([*ways, *longer], [*longer, *ways], strict=True)]
    return tuple(Fraction(total, 2**m) for total in accumulate(ways))


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, not at {confidence}")
