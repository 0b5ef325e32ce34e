"""How many pairs of launches, and what they say: a sequential rule whose error rates are chosen, not found out.

A cell (one model, n and precision) is *screened*: after 5, 9 and 14 pairs an interval for head / base is looked at, and
screening ends as soon as it says something. What looks like a change is *confirmed* with at least 9 fresh pairs, which
alone are judged: the ones that raised the suspicion were chosen for being extreme.

False alarms ("slower" or "faster", nothing changed). Fresh pairs know nothing of the screening, so their one-sided p
is a valid one whatever was suspected, and Holm's step-down over the suspected cells keeps the chance of any false alarm
in the whole comparison at ALPHA = 2 % at most. The screening lets a cell without change through with 2 TAIL = 10 % at
most, so one cell alone raises a false alarm in 0.1 x 0.02 = 0.2 % of comparisons; the rest is margin for noise that
drifts from pair to pair, which the theory leaves out.

False comfort ("same", the change is beyond the floor). "Same" is said where a whole interval lies within the floor.
Each look may be wrong on that side with the tail in LOOKS, Bonferroni over the looks gives TAIL = 5 % at most; after a
suspicion that did not hold, the fresh pairs' interval adds ALPHA.

LOOKS spends the 5 % as the signed ranks can use it: 5 pairs have 2**5 patterns of signs, so 1/32 is the least tail that
leaves anything out, and with less the first look could never end anything; 9 and 14 pairs share what is left. What is
neither confirmed nor excluded is inconclusive.

The p of signed ranks halves with each pair, Holm divides ALPHA by the number of suspected cells: a pair more for each
doubling of these keeps the room for pairs that contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerobench.stats import Change, Ratio, paired_ratio

LOOKS = ((5, 1 / 32), (9, 0.0098), (14, 0.0089))
"""(pairs, tail of the interval on either side)."""
TAIL = 0.05
CONFIRM = 9
ALPHA = 0.02
FLOOR = 0.03
MOST_ROUNDS = LOOKS[-1][0]


@dataclass(frozen=True)
class Pairs:
    """Seconds a step, one number a launch: the i-th of base ran next to the i-th of head. Lengths may differ by one."""

    base: tuple[float, ...] = ()
    head: tuple[float, ...] = ()

    def __len__(self) -> int:
        return min(len(self.base), len(self.head))

    def ratio(self, start: int, stop: int, tail: float) -> Ratio:
        return paired_ratio(self.base[start:stop], self.head[start:stop], tail)


@dataclass(frozen=True)
class Screening:
    """pairs: those that it has looked at, or that it waits for. change: None while it waits; slower and faster are
    suspicions."""

    pairs: int
    change: Change | None
    ratio: Ratio | None = None

    @property
    def suspicious(self) -> bool:
        return self.change in (Change.SLOWER, Change.FASTER)


@dataclass(frozen=True)
class Decision:
    """What the pairs of a cell say.

    ratio: over the `confirmed` pairs that came after the `screened` ones; over these where there was no suspicion to
    confirm. p: of the confirmation, before Holm. enough: whether the rule had all the pairs that it asked for.
    """

    change: Change
    ratio: Ratio | None
    screened: int
    confirmed: int = 0
    p: float | None = None
    enough: bool = True


def screen(pairs: Pairs, rounds: int = MOST_ROUNDS) -> Screening:
    """The first look that says something. rounds: look no later than after this many pairs."""
    looked = Screening(LOOKS[0][0], Change.INCONCLUSIVE)
    for count, tail in LOOKS:
        if count > rounds:
            break
        if count > len(pairs):
            return Screening(count, None, looked.ratio)
        ratio = pairs.ratio(0, count, tail)
        looked = Screening(count, ratio.change(FLOOR), ratio)
        if looked.change is not Change.INCONCLUSIVE:
            break
    return looked


def wanted(cells: Mapping[str, Pairs], rounds: int = MOST_ROUNDS) -> dict[str, int]:
    """How many pairs each cell should have by now. All have them: `decide`."""
    screened = {name: screen(pairs, rounds) for name, pairs in cells.items()}
    counts = {name: found.pairs for name, found in screened.items()}
    if all(found.change is not None for found in screened.values()):
        suspects = [name for name, found in screened.items() if found.suspicious]
        counts |= {name: counts[name] + confirming(len(suspects)) for name in suspects}
    return counts


def confirming(suspects: int) -> int:
    """Fresh pairs for each of so many suspected cells."""
    return CONFIRM + (suspects - 1).bit_length()


def decide(cells: Mapping[str, Pairs], rounds: int = MOST_ROUNDS) -> dict[str, Decision]:
    """What the pairs there are say, by cell. Pairs that the rule asked for and did not get make a cell inconclusive."""
    screened = {name: screen(pairs, rounds) for name, pairs in cells.items()}
    suspects = [name for name, found in screened.items() if found.suspicious]
    fresh: dict[str, Ratio] = {}
    out: dict[str, Decision] = {}
    for name, found in screened.items():
        if not found.suspicious:
            change, enough = found.change or Change.INCONCLUSIVE, found.change is not None
            out[name] = Decision(change, found.ratio, found.pairs if enough else len(cells[name]), enough=enough)
            continue
        start, more = found.pairs, confirming(len(suspects))
        if len(cells[name]) < start + more:
            out[name] = Decision(Change.INCONCLUSIVE, found.ratio, start, enough=False)
        else:
            fresh[name] = cells[name].ratio(start, start + more, ALPHA)
    up = {name: screened[name].change is Change.SLOWER for name in fresh}
    p = {name: ratio.slower if up[name] else ratio.faster for name, ratio in fresh.items()}
    real = holm(p | dict.fromkeys(set(suspects) - set(fresh), 1.0))
    for name, ratio in fresh.items():
        change = ratio.change(FLOOR)
        if change is not Change.SAME:
            change = _found_again(screened[name], ratio) if name in real else Change.INCONCLUSIVE
        out[name] = Decision(change, ratio, screened[name].pairs, ratio.pairs, p[name])
    return {name: out[name] for name in cells}


def _found_again(before: Screening, ratio: Ratio) -> Change:
    """The suspected change, if the fresh pairs put it beyond the floor too."""
    assert before.change is not None
    beyond = ratio.ratio > 1 + FLOOR if before.change is Change.SLOWER else ratio.ratio < 1 / (1 + FLOOR)
    return before.change if beyond else Change.INCONCLUSIVE


def holm(p: Mapping[str, float], alpha: float = ALPHA) -> frozenset[str]:
    """Those whose null hypothesis falls, with at most `alpha` chance that any of them was true (Holm 1979)."""
    fallen = set()
    for rank, name in enumerate(sorted(p, key=lambda each: p[each])):
        if p[name] > alpha / (len(p) - rank):
            break
        fallen.add(name)
    return frozenset(fallen)
