"""The GPU's link counters, read from a stand-in for NVML, and the closure that is judged from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from zerobench import nccl
from zerobench.checks.check import NotApplicable, Unreliable, View
from zerobench.checks.traffic import closure
from zerobench.finding import Status
from zerobench.nvml import Nvml, Tenancy
from zerobench.probes import counters
from zerobench.readings import Links, Place
from zerobench.record import Call, ModelFacts
from zerobench.terms import Collective
from zerobench.tests import made
from zerobench.tests.stand_in import PID, Play, play  # noqa: F401

KIB = 1024


def moved(play: Play, scene: str, ticks: int = 2) -> Links:  # noqa: F811
    """What the counters moved by in `ticks`, read by a process that is alone on its GPU."""
    library = play("idle")
    tenancy = Tenancy(Nvml().find("aaaa"), PID)
    library.zb_scene(scene.encode(), PID)
    before = counters.read(tenancy)
    for _ in range(ticks):
        library.zb_tick()
    return counters.difference(before, counters.read(tenancy), ticks, nccl.CANONICAL)


def test_counters_are_summed_over_the_links_that_are_up(play: Play) -> None:  # noqa: F811
    links = moved(play, "two")
    assert (links.steps, links.links, links.why) == (2, 3, {})
    assert (links.nvlink_sent, links.nvlink_received) == (3 * 2 * 1000 * KIB, 3 * 2 * 2000 * KIB)
    assert (links.pcie_sent, links.pcie_received) == (2 * 5000, 2 * 7000)
    assert links.settings == nccl.CANONICAL


def test_a_counter_that_goes_round_is_unwound(play: Play) -> None:  # noqa: F811
    assert moved(play, "wrap").nvlink_sent == 3 * 2 * 1000 * KIB


def test_a_counter_of_64_bits_that_goes_back_was_reset(play: Play) -> None:  # noqa: F811
    links = moved(play, "reset")
    assert links.nvlink_sent is None and "the device was reset" in links.why["nvlink_sent"]


def test_a_byte_counter_of_32_bits_is_not_believed(play: Play) -> None:  # noqa: F811
    links = moved(play, "pcie32")
    assert links.pcie_sent is None and "more than once" in links.why["pcie_sent"]
    assert links.nvlink_sent is not None


@pytest.mark.parametrize(
    ("scene", "why"), [("na", "Not Supported"), ("strangers", "2 processes share this GPU"), ("hidden", None)]
)
def test_absent_and_shared_counters_have_a_reason(play: Play, scene: str, why: str | None) -> None:  # noqa: F811
    links = moved(play, scene)
    if why is None:  # hidden pids, but nobody was there before
        assert links.nvlink_sent is not None
    else:
        assert links.nvlink_sent is None and why in links.why["nvlink_sent"]


def test_a_driver_that_goes_away_leaves_no_number(play: Play) -> None:  # noqa: F811
    library = play("idle")
    tenancy = Tenancy(Nvml().find("aaaa"), PID)
    library.zb_scene(b"two", PID)
    before = counters.read(tenancy)
    library.zb_lose()
    links = counters.difference(before, counters.read(tenancy), 1, {})
    assert links.nvlink_sent is links.pcie_sent is None
    assert "GPU is lost" in links.why["nvlink_sent"]


def test_ring_costs_are_nccl_tests_factors() -> None:
    def call(kind: Collective, group: tuple[int, ...] = (0, 1, 2, 3)) -> Call:
        return Call(1, "step", kind, 100, 400, "fp32", group)

    assert nccl.sent_nbytes(call(Collective.ALL_REDUCE), 0) == 600  # 2 (n-1)/n S
    assert nccl.sent_nbytes(call(Collective.REDUCE_SCATTER), 0) == 300
    assert nccl.sent_nbytes(call(Collective.ALL_GATHER), 3) == 300
    assert nccl.sent_nbytes(call(Collective.ALL_GATHER), 7) == 0, "not a member"
    assert nccl.sent_nbytes(call(Collective.ALL_REDUCE, (0,)), 0) == 0
    assert nccl.sent_nbytes(call(Collective.BROADCAST), 0) is None
    assert nccl.deviations(nccl.CANONICAL) == []
    assert nccl.deviations({"NCCL_ALGO": "Tree"}) == [
        "NCCL_ALGO=Tree, not Ring",
        "NCCL_PROTO=unset, not Simple",
        "NCCL_NVLS_ENABLE=unset, not 0",
    ]


# -- the check ---------------------------------------------------------------------------------------------------------

PSI = 4_000_000
STEPS = range(1, 4)
SENT = (
    Fraction(3, 4) * 2 * (2 * PSI) * len(STEPS)
)  # bytes: a reduce-scatter and an all-gather of Psi bf16 a step, n = 4


def judged(links: Links | None) -> Any:
    """traffic.closure of a stage 2 at n = 4 whose GPUs counted `links`."""

    def on_gpu(sample: Any) -> Any:
        calls = tuple(replace(c, numel=PSI, nbytes=2 * PSI) for c in sample.calls)
        return replace(sample, calls=calls, place=Place(f"cuda:{sample.rank}", "nccl", "gpu"), links=links)

    record = made.record(change=on_gpu, model=ModelFacts(PSI))
    return closure(View(made.CASE, {"wire": record}, record=record))


def links(sent: float, settings: Mapping[str, str] = nccl.CANONICAL, **more: Any) -> Links:
    return Links(len(STEPS), nvlink_sent=int(sent), links=3, settings=settings, **more)


def test_the_wire_closes_the_log() -> None:
    assert judged(links(SENT)).claim is Status.PASS
    assert judged(links(SENT * Fraction(1004, 1000))).claim is Status.PASS


@pytest.mark.parametrize("factor", [Fraction(99, 100), Fraction(102, 100), Fraction(2)])
def test_what_the_log_does_not_explain_is_invalid(factor: Fraction) -> None:
    with pytest.raises(Unreliable, match="carried what the log does not explain on each rank"):
        judged(links(SENT * factor))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "NVML is not open"),
        (Links(3, settings=nccl.CANONICAL, why={"nvlink_sent": "no NVLink is up"}), "no NVLink is up; PCIe carries"),
        (Links(3, settings=nccl.CANONICAL, why={"nvlink_sent": "2 processes share this GPU"}), "share this GPU"),
        (links(float(SENT), {"NCCL_ALGO": "Tree"}), "NCCL_ALGO=Tree, not Ring"),
    ],
)
def test_without_a_count_of_its_own_there_is_no_closure(found: Links | None, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        judged(found)
