"""Ranks that wait for each other in different collectives: told from what each last entered. Pure.

Collectives of one group must be the same on all its ranks and in the same order. So the k-th of a group is one call, and
where two ranks have different calls as their k-th, that is the fault, whatever came of it: a hang, a crash, wrong sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerobench.launch.blackbox import Entry

Logs = Mapping[int, Sequence[Entry]]
UNKNOWN = "-"  # a group whose ranks torch does not know is written "-1,-1"


@dataclass(frozen=True)
class Disagreement:
    """text: in a sentence. ranks: those of the group that entered the collective."""

    text: str
    ranks: frozenset[int]


def disagreement(logs: Logs) -> Disagreement | None:
    """The first collective that ranks of a group disagree on; None if what is known of them agrees."""
    for group, ranks in _by_group(logs).items():
        for ordinal in sorted({k for calls in ranks.values() for k in calls}):
            here = {rank: calls[ordinal] for rank, calls in ranks.items() if ordinal in calls}
            if len({entry.key for entry in here.values()}) > 1:
                aspect = _aspect(here, ranks, ordinal)
                text = f"the ranks disagree on the {aspect} of collective {ordinal} of ranks {group}: {_said(here)}"
                return Disagreement(text, frozenset(here))
    return None


def unanswered(logs: Logs) -> str:
    """Which ranks wait in a collective that others of its group have not entered; "" if there is no such."""
    parts = []
    for group, ranks in _by_group(logs).items():
        last = {rank: max(calls) for rank, calls in ranks.items()} | {r: 0 for r in _members(group) if r not in ranks}
        furthest = max(last.values())
        behind = [rank for rank, ordinal in sorted(last.items()) if ordinal < furthest]
        if behind:
            ahead = {rank: ranks[rank][furthest] for rank, ordinal in sorted(last.items()) if ordinal == furthest}
            parts.append(
                f"{_said(ahead)} (collective {furthest} of ranks {group}), which {_ranks(behind)} did not enter"
            )
    return "; ".join(parts)


def _by_group(logs: Logs) -> dict[str, dict[int, dict[int, Entry]]]:
    groups: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in sorted(logs.items()):
        for entry in entries:
            if not entry.group.startswith(UNKNOWN):
                groups.setdefault(entry.group, {}).setdefault(rank, {})[entry.ordinal] = entry
    return groups


def _aspect(here: Mapping[int, Entry], ranks: Mapping[int, Mapping[int, Entry]], ordinal: int) -> str:
    """ "order" where what one rank entered comes later on another, else what differs in the call."""
    for rank, entry in here.items():
        for other, calls in ranks.items():
            later = (e.key for k, e in calls.items() if k > ordinal)
            if other != rank and calls.get(ordinal) and calls[ordinal].key != entry.key and entry.key in later:
                return "order"
    kinds = {entry.key.split(" ", 1)[0] for entry in here.values()}
    if len(kinds) > 1:
        return "kind"
    sizes = {entry.key.rpartition(" ")[0] for entry in here.values()}
    return "size" if len(sizes) > 1 else "root"


def _said(entries: Mapping[int, Entry]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        alike.setdefault(entry.text, []).append(rank)
    return ", ".join(f"{_ranks(ranks)} entered {text}" for text, ranks in alike.items())


def _members(group: str) -> list[int]:
    out: list[int] = []
    for part in group.partition(" ")[0].split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
