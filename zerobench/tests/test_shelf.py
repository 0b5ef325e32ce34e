"""Records on a shelf are what they were, in their order, however few stay objects."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zerobench.case import Case
from zerobench.record import Record, Sample
from zerobench.shelf import Shelf


def record(i: int, reason: str = "") -> Record:
    case = Case("zero2", "zero2", "mlp-tiny", 2, options={"i": i})
    return Record("s", case.run("plain"), "ok", reason, samples=(Sample(0, times_s=(i / 3,)), Sample(1)))


@pytest.mark.parametrize("kept", [1, 2, 5, 100])
def test_records_come_back_as_they_were(kept: int) -> None:
    shelf, all_ = Shelf(kept), [record(i) for i in range(7)]
    for i, one in enumerate(all_):
        if i % 2:
            shelf[one.id] = one
        else:
            shelf.put(one, json.dumps(one.to_json()).encode() + b"\n")
    assert list(shelf) == [one.id for one in all_]
    assert len(shelf) == 7
    for _ in range(2):  # a second reading, after the first has changed what is open
        assert list(shelf.values()) == all_
    assert len(shelf._open) <= kept
    again = replace(all_[0], reason="again")
    shelf[again.id] = again
    assert [shelf[all_[0].id], len(shelf), next(iter(shelf))] == [again, 7, again.id]
    assert all_[1].id in shelf
    del shelf[all_[1].id]
    assert all_[1].id not in shelf
    with pytest.raises(KeyError):
        shelf[all_[1].id]
