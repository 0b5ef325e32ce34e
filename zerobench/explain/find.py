"""Which case of a results file a word means."""

from __future__ import annotations

from collections.abc import Iterable

from zerobench.case import Case
from zerobench.loader import did_you_mean
from zerobench.record import Provenance

LISTED = 12


def cases_of(provenances: Iterable[Provenance]) -> dict[str, Case]:
    """All cases that any session of a results file was about, by id."""
    cases = (Case.from_json(dict(case)) for about in provenances for case in about.cases)
    return {case.id: case for case in cases}


def find_case(word: str, cases: dict[str, Case]) -> Case:
    """The case with this id, or the only one whose id has `word` in it.

    Raises ValueError with the nearest id where there is none, and with those that match where there are several.
    """
    if word in cases:
        return cases[word]
    found = [id for id in cases if word in id]
    if len(found) == 1:
        return cases[found[0]]
    if found:
        raise ValueError(f"{word!r} is part of {len(found)} cases, name one: {_listed(found)}")
    raise ValueError(f"no case {word!r}{did_you_mean(word, cases)}; there are {_listed(list(cases))}")


def _listed(ids: list[str]) -> str:
    more = f" and {len(ids) - LISTED} more" if len(ids) > LISTED else ""
    return ", ".join(repr(id)[1:-1] for id in ids[:LISTED]) + more
