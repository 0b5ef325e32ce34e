"""Intervals and tests against tables, exact probabilities and known symmetries."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from zerobench.stats import Change, median_interval, paired_ratio, sign_test, t_quantile


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [  # two-sided critical values of Student's t, as printed in statistical tables
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 4, 2.776),
        (0.95, 5, 2.571),
        (0.99, 9, 3.250),
        (0.95, 30, 2.042),
        (0.99, 120, 2.617),
    ],
)
def test_t_quantile_is_the_table_s(confidence, freedom, expected):
    assert t_quantile(confidence, freedom) == pytest.approx(expected, abs=5e-4)


def test_t_quantile_has_closed_forms_for_one_and_two_degrees():
    assert t_quantile(0.5, 1) == pytest.approx(1.0, rel=1e-12)  # Cauchy quartile
    assert t_quantile(0.9, 2) == pytest.approx(0.9 * math.sqrt(2 / (1 - 0.81)), rel=1e-12)


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


def test_sign_test_is_binomial():
    assert sign_test([1, 1, 1, 1, 1]) == 2 / 32
    assert sign_test([1, 1, 1, 1, -1, 0]) == 12 / 32
    assert sign_test([1, -1]) == 1.0
    assert sign_test([]) == 1.0
    assert sign_test([1.0] * 2000) < 1e-300


def test_a_steady_slowdown_is_seen_through_drift_that_both_share():
    drift = [1.0, 1.3, 0.8, 1.1, 2.0, 0.9]
    base = [10 * d for d in drift]
    head = [10.5 * d * (1 + e) for d, e in zip(drift, (0.001, -0.001, 0.002, 0, -0.002, 0.001), strict=True)]
    ratio = paired_ratio(base, head)
    assert ratio.interval.low < 1.05 < ratio.interval.high
    assert ratio.change(0.03) is Change.SLOWER
    assert paired_ratio(head, base).change(0.03) is Change.FASTER
    assert paired_ratio(head, base).ratio == pytest.approx(1 / ratio.ratio)
    assert ratio.change(0.10) is Change.SAME
    assert paired_ratio([1] * 5, [0.6] * 5).change(0.5) is Change.FASTER  # 0.6 lies beyond 1 / 1.5, not beyond 1 - 0.5


def test_too_little_evidence_is_inconclusive():
    assert paired_ratio([1] * 4, [2] * 4).change() is Change.INCONCLUSIVE  # four pairs, however clear
    assert paired_ratio([1] * 5, [2] * 5).change() is Change.SLOWER
    noisy = paired_ratio([1, 1, 1, 1, 1], [0.8, 1.3, 1.0, 1.2, 0.9])
    assert noisy.change() is Change.INCONCLUSIVE


def test_false_alarms_are_as_rare_as_the_confidence_says():
    """No effect, 400 experiments of 6 pairs with 5 % noise: a 95 % interval leaves out 1 in about one of twenty."""
    draw = random.Random(7)

    def launches() -> list[float]:
        return [math.exp(draw.gauss(0, 0.05)) for _ in range(6)]

    missed = 0
    for _ in range(400):
        interval = paired_ratio(launches(), launches()).interval
        missed += not interval.low <= 1 <= interval.high
    assert 8 <= missed <= 36  # 20 expected; these are 2.8 and 3.7 standard deviations away


@pytest.mark.parametrize(
    ("base", "head"), [([1, 2], [1]), ([1], [1]), ([1, 0], [1, 1]), ([1, 1], [1, math.inf]), ([1, 1], [1, math.nan])]
)
def test_what_is_refused(base, head):
    with pytest.raises(ValueError):
        paired_ratio(base, head)
