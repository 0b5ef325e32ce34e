"""Medians, intervals and the paired test, in the standard library, deterministic.

What is independent decides what may be counted. Steps of one launch share clocks, placement and allocator state; 50 of
them against 50 of another launch give false alarms in most comparisons. So the unit of replication is the *launch*:
give these functions one number a launch (its median step), and pair launches that ran next to each other in time.

`median_interval` and `sign_test` assume independent launches and nothing about the distribution. The interval of
`paired_ratio` assumes, in addition, that the log-ratios of the pairs are roughly normal: ratios because noise in time
is multiplicative (a slower clock scales every step), pairs because what changes slowly then cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from statistics import fmean, median, stdev

__all__ = [
    "Change",
    "Interval",
    "Ratio",
    "median",
    "median_interval",
    "paired_ratio",
    "rank_sum",
    "sign_test",
    "t_quantile",
]

MIN_PAIRS = 5
"""Fewer pairs are never evidence: with 4 even the exact sign test cannot reach 5 % on either side (2 * 0.5**4)."""


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
    best, below = None, 0  # below: 2**m P(Binomial < k), as a whole number
    for k in range(1, m // 2 + 1):
        below += math.comb(m, k - 1)
        covered = float(1 - Fraction(2 * below, 2**m))  # 2**m may be past any float
        if covered < confidence:
            break
        best = Interval(ordered[k - 1], ordered[m - k], covered)
    return best


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided exact p that differences have median 0; zeros are dropped, as the test asks. 1.0 where none is left."""
    signs = [d > 0 for d in differences if d]
    fewer = min(sum(signs), len(signs) - sum(signs))
    tail = sum(math.comb(len(signs), i) for i in range(fewer + 1))
    return min(1.0, float(Fraction(2 * tail, 2 ** len(signs))))


def rank_sum(base: Sequence[float], head: Sequence[float]) -> float:
    """One-sided exact p that launches of head are as slow as these by chance; small: head is slower. Not paired.

    Wilcoxon's rank sum with mid-ranks for ties: of all ways to call len(head) of the pooled values head, the share
    whose ranks add up to at least what head's do. Exact, because at five launches no approximation holds. Source:
    Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 4.1. Raises ValueError where a side is empty.
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
    """What an interval for head / base says against an effect floor."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Ratio:
    """head / base over pairs of launches: the geometric mean, Student's interval on log-ratios, the sign test's p."""

    ratio: float
    interval: Interval
    p_sign: float
    pairs: int

    def change(self, floor: float = 0.03) -> Change:
        """Slower or faster only where the whole interval lies beyond `floor` (0.03 is 3 %); same where all is within.

        The limits are 1 + floor and 1 / (1 + floor), so that swapping base and head swaps the answer.
        """
        if floor < 0:
            raise ValueError(f"an effect floor is at least 0, not {floor}")
        upper, lower = 1 + floor, 1 / (1 + floor)
        if self.pairs < MIN_PAIRS:
            return Change.INCONCLUSIVE
        if self.interval.low > upper:
            return Change.SLOWER
        if self.interval.high < lower:
            return Change.FASTER
        if lower <= self.interval.low and self.interval.high <= upper:
            return Change.SAME
        return Change.INCONCLUSIVE


def paired_ratio(base: Sequence[float], head: Sequence[float], confidence: float = 0.95) -> Ratio:
    """How head compares with base, launch i of one with launch i of the other.

    Raises ValueError for unequal lengths, fewer than two pairs (no spread, so no interval) and times that are not
    positive.
    """
    _require_confidence(confidence)
    if len(base) != len(head):
        raise ValueError(f"launches must come in pairs: {len(base)} of base, {len(head)} of head")
    if len(base) < 2:
        raise ValueError(f"an interval needs at least 2 pairs of launches, not {len(base)}")
    if not all(0 < t < math.inf for t in (*base, *head)):
        raise ValueError("times must be positive and finite")
    logs = [math.log(h / b) for b, h in zip(base, head, strict=True)]
    centre = fmean(logs)
    reach = t_quantile(confidence, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    interval = Interval(math.exp(centre - reach), math.exp(centre + reach), confidence)
    return Ratio(math.exp(centre), interval, sign_test(logs), len(logs))


def t_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = confidence, for Student's T with `freedom` whole degrees of freedom.

    P is the finite sum of Abramowitz and Stegun 26.7.3 and 26.7.4 in theta = atan(t / sqrt(freedom)); it grows with
    theta, so bisection finds it.
    """
    _require_confidence(confidence)
    if freedom < 1:
        raise ValueError(f"degrees of freedom: at least 1, not {freedom}")
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # halves the bracket to below one ulp
        theta = (low + high) / 2
        if _within(theta, freedom) < confidence:
            low = theta
        else:
            high = theta
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(theta: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(theta))."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for i in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (i + 1) / (i + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def _require_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, not at {confidence}")
