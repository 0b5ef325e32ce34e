"""The trace of a step: a file that Perfetto loads, whose bytes are the ledger's and whose slices nest."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from zerobench.case import Case
from zerobench.probes.ledger import Ledger
from zerobench.probes.steptrace import POINTS, StepTrace, _thinned
from zerobench.probes.traffic import Tap
from zerobench.report.trace import COLLECTIVES, PHASES, file_name, trace_of, write
from zerobench.terms import Category
from zerobench.tracing import trace_runs

RUN = Case("zero2", "zero2", "mlp-tiny", 2, "bf16").run("plain")


def valid(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace, after what the Trace Event format asks of them."""
    events = trace["traceEvents"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert all(e["ph"] in "MCXi" for e in events)  # complete events: no B that could lack its E
    named = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == named
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"} <= tracks
    for pid, tid in tracks:
        open_until = [float("inf")]
        for e in (e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)):
            while e["ts"] >= open_until[-1]:
                open_until.pop()
            assert e["dur"] >= 0 and e["ts"] + e["dur"] <= open_until[-1] + 1e-6  # nests, or follows
            open_until.append(e["ts"] + e["dur"])
    assert all(v >= 0 for e in events if e["ph"] == "C" for v in e["args"].values())
    return events


def test_a_real_step_of_stage_2(tmp_path: Path) -> None:
    """At the step's end a rank holds 2 Psi of weights, 2 Psi/n of gradients and 12 Psi/n of optimizer, and no more."""
    assert trace_runs([RUN], tmp_path, deadline_s=60) == 1
    (path,) = tmp_path.iterdir()
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = valid(trace)
    assert {e["pid"] for e in events} == {0, 1}
    assert "watched step" in trace["otherData"]["times"]
    mine = [e for e in events if e["pid"] == 0]
    names = [e["name"] for e in mine if e["ph"] == "X" and e["tid"] == PHASES and "suite" not in e["name"]]
    assert names == ["forward", "backward", "step"]
    kinds = {e["name"] for e in mine if e["ph"] == "X" and e["tid"] >= COLLECTIVES}
    assert kinds == {"reduce-scatter", "all-gather"}
    last = [e["args"] for e in mine if e["ph"] == "C"][-1]
    psi = last["parameter"] // 2
    assert psi > 1000 and last["gradient"] == pytest.approx(psi, abs=64)
    assert last["optimizer"] == pytest.approx(6 * psi, abs=300)
    assert last["unclaimed"] == last["backend"] == 0
    assert max(e["args"]["unclaimed"] for e in mine if e["ph"] == "C") > psi  # activations and buckets, meanwhile
    assert any(e["ph"] == "i" and e["name"].startswith("backward reaches") for e in mine)


def test_bytes_go_to_the_category_that_claims_them_and_back() -> None:
    with Ledger() as ledger:
        ledger.baseline()
        weight = torch.zeros(100)
        trace = StepTrace(ledger, Tap(), asynchronous=True)
        trace.begin({Category.PARAMETER: [weight]})
        temporary = torch.ones(50)
        gradient = torch.ones(25)
        with trace.reading():
            unseen = torch.ones(1000)
            ledger.ignore([unseen])
        trace.claim({Category.PARAMETER: [weight], Category.GRADIENT: [gradient]})
        del temporary
        trace.end()
        after = torch.ones(7)
    rows = [tuple(e["args"].values())[:4] for e in trace.events() if e["ph"] == "C"]
    assert rows == [(400, 0, 0, 0), (400, 0, 0, 200), (400, 100, 0, 200), (400, 100, 0, 0), (400, 100, 0, 0)]
    assert after.numel() == 7  # made after the end: not followed


def test_collectives_at_once_have_tracks_of_their_own() -> None:
    def call(start: int, dur: int) -> dict[str, Any]:
        return {"ph": "X", "track": "collectives", "name": "all-gather", "ts": start, "dur": dur}

    trace = trace_of(RUN, {0: [call(1000, 5000), call(2000, 1000), call(4000, 1000), call(6000, 10)]}, "gloo")
    events = [e for e in valid(trace) if e["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["tid"]) for e in events] == [
        (0.0, 5.0, COLLECTIVES),
        (1.0, 1.0, COLLECTIVES + 1),
        (3.0, 1.0, COLLECTIVES + 1),
        (5.0, 0.01, COLLECTIVES),
    ]


def test_thinning_keeps_the_highest() -> None:
    rows = [(i, (i % 997, 0)) for i in range(5 * POINTS)]
    kept = _thinned(rows)
    assert len(kept) <= POINTS and max(kept, key=lambda r: r[1]) == (996, (996, 0)) and kept[-1] == rows[-1]
    assert _thinned(rows[:100]) == rows[:100]


def test_the_same_trace_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(trace_of(RUN, {}, "gloo"), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert file_name(RUN) == "zero2-mlp-tiny-n2-bf16.json.gz"
    assert re.fullmatch(r"[A-Za-z0-9._=-]+", file_name(Case("a/../<b>", "x", "m \n", 1).run("plain")))
