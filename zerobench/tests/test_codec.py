"""What is written to a record comes back as it was."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.case import Case, Run
from zerobench.claims import Claims, Recipe
from zerobench.codec import decode, encode
from zerobench.record import (
    Boundary,
    Call,
    Comparison,
    Digest,
    Failure,
    Holding,
    ModelFacts,
    Peak,
    Piece,
    Record,
    Report,
    Sample,
    Wire,
)
from zerobench.terms import Collective, Moment, Stage

numbers = st.floats(allow_nan=False)
words = st.text(max_size=8)
whole = st.integers(0, 2**53)
calls = st.builds(
    Call,
    step=st.integers(-1, 9),
    phase=words,
    kind=st.sampled_from(Collective),
    numel=whole,
    nbytes=whole,
    dtype=words,
    group=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    root=st.none() | st.integers(0, 9),
)
holdings = st.builds(
    Holding,
    step=st.integers(-1, 9),
    moment=st.sampled_from(Moment),
    claimed=st.dictionaries(words, whole, max_size=3),
    live=whole,
    unclaimed=whole,
    pieces=st.lists(st.builds(Piece, nbytes=whole, by=words, looks_like=st.none() | words), max_size=2).map(tuple),
)
samples = st.builds(
    Sample,
    rank=st.integers(0, 9),
    calls=st.lists(calls, max_size=2).map(tuple),
    holdings=st.lists(holdings, max_size=2).map(tuple),
    peaks=st.lists(st.builds(Peak, step=whole, phase=words, nbytes=whole), max_size=1).map(tuple),
    boundaries=st.lists(st.builds(Boundary, step=whole, unit=words, live=whole, bare=whole), max_size=1).map(tuple),
    wire=st.none() | st.builds(Wire, steps=whole, received_nbytes=whole, sent_nbytes=whole, sockets=whole),
    times_s=st.lists(numbers, max_size=2).map(tuple),
    comparisons=st.lists(
        st.builds(Comparison, step=whole, what=words, name=words, numel=whole, mismatches=whole, worst=numbers),
        max_size=1,
    ).map(tuple),
    digests=st.lists(st.builds(Digest, step=whole, what=words, value=words), max_size=1).map(tuple),
    reports=st.lists(st.builds(Report, step=whole, loss=numbers, grad_norm=st.none() | numbers), max_size=1).map(tuple),
    failure=st.none() | st.builds(Failure, kind=words, what=words),
)
claims = st.builds(
    Claims,
    stage=st.sampled_from(Stage),
    recipe=st.none() | st.just(Recipe()),
    supports=st.sets(st.sampled_from(["bucket", "tied"])).map(frozenset),
    volume=st.none() | st.just("A+2"),
)


@given(st.lists(samples, max_size=2), claims, words)
def test_a_record_comes_back_as_it_was(found: list[Sample], claimed: Claims, suite: str) -> None:
    run = Case("zero2", "zero2", "gpt-tiny", 4, "bf16", options={"k": 1}).run("plain")
    record = Record(suite, run, "ok", claims=claimed, model=ModelFacts(7, units=(3, 4)), samples=tuple(found))
    line = json.dumps(record.to_json(), allow_nan=False)
    assert Record.from_json(json.loads(line)) == record


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_numbers_travel_as_words(value: float) -> None:
    text = json.dumps(encode(Report(0, value)), allow_nan=False)
    assert decode(Report, json.loads(text)).loss == value
    assert math.isnan(decode(Report, json.loads(json.dumps(encode(Report(0, math.nan))))).loss)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"record": {"schema": 99}}, "schema 99"),
        ({"record": []}, "not a zerobench record"),
        ({"record": {"schema": 1, "suite": 3, "run": {}, "status": "ok"}}, "record."),
        ({"other": 1}, "not a zerobench record"),
    ],
)
def test_what_is_not_ours_is_refused_with_the_place(body: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Record.from_json(body)


def test_unknown_keys_of_a_later_version_are_passed_over() -> None:
    run = Case("a", "a", "m", 1).run("plain")
    body = run.to_json() | {"later": True}
    assert Run.from_json(body) == run
