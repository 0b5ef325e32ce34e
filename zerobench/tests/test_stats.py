"""Intervals and tests against tables, exact probabilities and known symmetries."""

from __future__ import annotations

import math
from itertools import product

import pytest

from zerobench.stats import Change, median_interval, paired_ratio


def test_median_interval_takes_the_narrowest_that_covers():
    assert median_interval([5, 1, 3, 2, 4]) is None  # 1 - 2/32 is 93.75 %
    six = median_interval([6, 1, 3, 2, 4, 5])
    assert (six.low, six.high, six.confidence) == (1, 6, 1 - 2 / 64)
    ten = median_interval(range(1, 11))
    assert (ten.low, ten.high) == (2, 9)  # 1 - 2 (1 + 10) / 1024 is 97.9 %; the next pair covers 89 %


def test_median_interval_covers_as_often_as_it_says():
    """Exactly: each of m values is below the median or not, with equal chance; count the patterns it fails on."""
    m = 9
    interval = median_interval(range(1, m + 1), 0.9)
    covered = 0
    for pattern in product((False, True), repeat=m):
        below = sum(pattern)  # sorted, the median lies between the below-th value and the next
        covered += interval.low <= below + 0.5 <= interval.high
    assert covered / 2**m == interval.confidence >= 0.9


def test_signed_ranks_are_exact():
    """Every pattern of signs of five different log-ratios: the p is the share of patterns that lean as far."""
    sizes = (0.01, 0.02, 0.03, 0.04, 0.05)

    def ratio(signs):
        return paired_ratio([1.0] * 5, [math.exp(s * d) for s, d in zip(signs, sizes, strict=True)], 0.05)

    def ranks(signs):
        return sum(rank for rank, s in enumerate(signs, 1) if s > 0)

    patterns = list(product((-1, 1), repeat=5))
    for signs in patterns:
        as_far = sum(ranks(other) >= ranks(signs) for other in patterns)
        assert ratio(signs).slower == as_far / 2**5
        assert ratio(signs).faster == ratio([-s for s in signs]).slower


@pytest.mark.parametrize(
    ("pairs", "tail", "left_out"),
    [(9, 0.025, 5), (14, 0.01, 15), (20, 0.025, 52)],  # one-sided critical values, as printed in tables
)
def test_the_interval_s_ends_are_the_table_s(pairs, tail, left_out):
    logs = [0.01 * (2 * i + 1) ** 1.3 for i in range(pairs)]
    averages = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    interval = paired_ratio([1.0] * pairs, [math.exp(d) for d in logs], tail).interval
    assert math.log(interval.low) == pytest.approx(averages[left_out])
    assert math.log(interval.high) == pytest.approx(averages[-1 - left_out])


def test_a_steady_slowdown_is_seen_through_drift_that_both_share():
    drift = [1.0, 1.3, 0.8, 1.1, 2.0, 0.9]
    base = [10 * d for d in drift]
    head = [10.5 * d * (1 + e) for d, e in zip(drift, (0.001, -0.001, 0.002, 0, -0.002, 0.001), strict=True)]
    ratio, swapped = paired_ratio(base, head, 0.025), paired_ratio(head, base, 0.025)
    assert ratio.interval.low < 1.05 < ratio.interval.high
    assert ratio.change(0.03) is Change.SLOWER
    assert swapped.change(0.03) is Change.FASTER
    assert swapped.ratio == pytest.approx(1 / ratio.ratio)
    assert ratio.change(0.10) is Change.SAME


def test_one_wild_launch_moves_the_estimate_little():
    base, head = [1.0] * 9, [1.05] * 8 + [20.0]
    assert paired_ratio(base, head, 0.02).ratio == pytest.approx(1.05)


def test_more_than_chance_and_more_than_a_trifle():
    certain_but_small = paired_ratio([1.0] * 6, [1.01, 1.012, 1.014, 1.011, 1.013, 1.06], 0.025)
    assert certain_but_small.interval.low > 1
    assert certain_but_small.change(0.03) is Change.INCONCLUSIVE  # at most 6 %: neither a slowdown of 3 % nor none
    large_but_uncertain = paired_ratio([1.0] * 6, [0.8, 1.3, 1.4, 1.2, 0.9, 1.3], 0.025)
    assert large_but_uncertain.ratio > 1.1
    assert large_but_uncertain.change(0.03) is Change.INCONCLUSIVE


def test_too_few_pairs_leave_nothing_out():
    assert paired_ratio([1] * 4, [2] * 4, 1 / 32).interval is None
    assert paired_ratio([1] * 4, [2] * 4, 1 / 32).change(0.03) is Change.INCONCLUSIVE
    assert paired_ratio([1] * 5, [2] * 5, 1 / 32).change(0.03) is Change.SLOWER


@pytest.mark.parametrize(
    ("base", "head", "tail"),
    [
        ([1, 2], [1], 0.02),
        ([], [], 0.02),
        ([1, 0], [1, 1], 0.02),
        ([1, 1], [1, math.inf], 0.02),
        ([1, 1], [1, math.nan], 0.02),
        ([1, 1], [1, 1], 0.5),
    ],
)
def test_what_is_refused(base, head, tail):
    with pytest.raises(ValueError):
        paired_ratio(base, head, tail)
