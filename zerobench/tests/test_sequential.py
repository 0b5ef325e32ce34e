"""The sequential rule: when it ends, what it asks for, and how often it errs, on noise made by a seeded generator."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from zerobench.sequential import (
    ALPHA,
    CONFIRM,
    LOOKS,
    TAIL,
    Pairs,
    confirming,
    decide,
    holm,
    screen,
    wanted,
)
from zerobench.stats import Change, paired_ratio


def steady(ratio: float, pairs: int, wobble: float = 0.004) -> Pairs:
    """Pairs at `ratio`, apart by up to `wobble`, the same for every call."""
    logs = [math.log(ratio) + wobble * math.sin(3.1 * i) for i in range(pairs)]
    return Pairs((1.0,) * pairs, tuple(math.exp(d) for d in logs))


def test_the_tails_are_spent_once() -> None:
    assert sum(tail for _, tail in LOOKS) <= TAIL
    for pairs, tail in LOOKS:  # each look can end a screening: its tail leaves something out
        assert paired_ratio([1.0] * pairs, [2.0] * pairs, tail).interval is not None


def test_equal_sides_end_after_the_first_look() -> None:
    assert wanted({"a": Pairs()}) == {"a": 5}
    decision = decide({"a": steady(1.0, 5)})["a"]
    assert (decision.change, decision.screened, decision.confirmed) == (Change.SAME, 5, 0)
    assert wanted({"a": steady(1.0, 5)}) == {"a": 5}


def test_what_is_open_waits_for_the_next_look() -> None:
    noisy = Pairs((1.0,) * 14, (1.3, 0.8, 1.2, 0.7, 1.1, 0.9, 1.0, 1.3, 0.75, 1.2, 0.8, 1.1, 0.9, 1.0))
    for have, asks in ((5, 9), (8, 9), (9, 14), (14, 14)):
        assert wanted({"a": Pairs(noisy.base[:have], noisy.head[:have])}) == {"a": asks}
    assert decide({"a": noisy})["a"].change is Change.INCONCLUSIVE
    assert decide({"a": noisy}, rounds=9)["a"].screened == 9
    assert wanted({"a": Pairs(noisy.base[:9], noisy.head[:9])}, rounds=9) == {"a": 9}


@pytest.mark.parametrize(("ratio", "change"), [(1.1, Change.SLOWER), (1 / 1.1, Change.FASTER)])
def test_a_change_is_confirmed_by_fresh_pairs_alone(ratio: float, change: Change) -> None:
    suspected = steady(ratio, 5)
    assert screen(suspected).suspicious
    assert wanted({"a": suspected}) == {"a": 5 + CONFIRM}
    unfinished = decide({"a": suspected})["a"]
    assert (unfinished.change, unfinished.enough) == (Change.INCONCLUSIVE, False)
    assert decide({"a": steady(ratio, 14)})["a"].change is change
    equal = steady(1.0, CONFIRM)
    gone = Pairs(suspected.base + equal.base, suspected.head + equal.head)
    assert decide({"a": gone})["a"].change is Change.SAME
    turned = steady(1 / ratio, CONFIRM)  # fresh pairs that say the opposite confirm nothing
    assert decide({"a": Pairs(suspected.base + turned.base, suspected.head + turned.head)})["a"].change not in (
        Change.SLOWER,
        Change.FASTER,
    )


def test_confirmation_waits_until_every_cell_is_screened_and_grows_with_the_suspects() -> None:
    cells = {"slow": steady(1.1, 5), "open": Pairs()}
    assert wanted(cells) == {"slow": 5, "open": 5}
    assert [confirming(k) for k in (1, 2, 3, 4, 5, 40)] == [9, 10, 11, 11, 12, 15]
    many = {str(i): steady(1.1, 5 + confirming(40)) for i in range(40)}
    assert {d.change for d in decide(many).values()} == {Change.SLOWER}


def test_holm_divides_alpha_by_the_hypotheses_that_still_stand() -> None:
    assert holm({"a": ALPHA, "b": ALPHA / 2}) == {"a", "b"}
    assert holm({"a": ALPHA, "b": ALPHA / 2 + 1e-9}) == frozenset()  # the smallest must pass alpha / 2 first
    assert holm({"a": ALPHA / 3, "b": ALPHA, "c": 1.0}) == {"a"}
    assert holm({}) == frozenset()


def rates(effect: float, spread: float, wild: bool, repeats: int) -> Counter[Change]:
    """What the rule says of `repeats` cells whose log-ratios are normal, or Student's t with 2 degrees of freedom."""
    draw = random.Random(20)

    def noise() -> float:
        normal = draw.gauss(0, spread)
        return normal / math.sqrt(draw.expovariate(1.0)) if wild else normal

    found: Counter[Change] = Counter()
    for _ in range(repeats):
        cell = Pairs()
        while len(cell) < (need := wanted({"": cell})[""]):
            more = need - len(cell)
            heads = tuple(math.exp(math.log1p(effect) + noise()) for _ in range(more))
            cell = Pairs(cell.base + (1.0,) * more, cell.head + heads)
        found[decide({"": cell})[""].change] += 1
    return found


@pytest.mark.parametrize("wild", [False, True])
def test_false_alarms_are_rarer_than_promised(wild: bool) -> None:
    found = rates(0.0, 0.04, wild, 400)
    assert found[Change.SLOWER] + found[Change.FASTER] <= ALPHA * 400 / 2


def test_a_tenth_is_found_through_noise_of_four_percent() -> None:
    assert rates(0.10, 0.04, False, 100)[Change.SLOWER] >= 95


def test_a_slowdown_of_the_floor_is_rarely_called_the_same() -> None:
    """At the floor itself, where "same" is just wrong: TAIL and ALPHA bound it, 14 of 200 expected at most."""
    assert rates(0.03, 0.02, False, 200)[Change.SAME] <= 24  # 2.7 standard deviations above
