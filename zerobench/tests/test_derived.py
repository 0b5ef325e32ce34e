"""Figures derived from seconds, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from zerobench.checks.catalogue import CHECKS
from zerobench.checks.check import View
from zerobench.derived import bus_bandwidth, bus_factor, mfu, peak_of, step_flops, tokens_per_second
from zerobench.readings import Place
from zerobench.record import Call
from zerobench.terms import Collective
from zerobench.tests.made import CASE, PSI, record


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (Collective.ALL_REDUCE, Fraction(3, 2)),
        (Collective.REDUCE_SCATTER, Fraction(3, 4)),
        (Collective.ALL_GATHER, Fraction(3, 4)),
        (Collective.ALL_TO_ALL, Fraction(3, 4)),
        (Collective.BROADCAST, Fraction(1)),
        (Collective.REDUCE, Fraction(1)),
        (Collective.RECV, Fraction(0)),
        (Collective.BARRIER, Fraction(0)),
    ],
)
def test_bus_factors_are_those_of_nccl_tests_on_four_ranks(kind: Collective, factor: Fraction) -> None:
    assert bus_factor(kind, 4) == factor
    assert bus_factor(kind, 1) == 0


def test_bus_bandwidth_by_hand() -> None:
    """800 bytes all-reduced on 4 ranks cross the bus 1.5 times: 1200 bytes; in 0.5 s that is 2400 B/s."""
    world = (0, 1, 2, 3)
    calls = [Call(0, "backward", Collective.ALL_REDUCE, 200, 800, "fp32", world)]
    calls += [Call(0, "step", Collective.ALL_GATHER, 100, 400, "fp32", world)] * 2
    calls += [Call(0, "step", Collective.BARRIER, 0, 0, "", world)]
    assert bus_bandwidth(calls, 0.5) == {Collective.ALL_REDUCE: 2400.0, Collective.ALL_GATHER: 1200.0}
    with pytest.raises(ValueError, match="a step of 0"):
        bus_bandwidth(calls, 0)


def test_tokens_and_mfu_by_hand() -> None:
    """Psi = 1e9 and 1000 tokens cost 6e12 FLOPs; in 1 s on 2 A100 (312e12 each) that is 6 / 624."""
    assert tokens_per_second(250, 2, 2, 0.5) == 2000
    assert step_flops(10**9, 1000) == 6 * 10**12
    a100 = peak_of("NVIDIA A100-SXM4-80GB", "bf16")
    assert a100 is not None and a100.flops == 312e12
    assert mfu(10**9, 1000, 1.0, a100, 2) == pytest.approx(6 / 624)


@pytest.mark.parametrize(
    ("card", "precision"),
    [
        ("NVIDIA H200 MIG 1g.18gb", "bf16"),
        ("NVIDIA H200", "fp32"),
        ("Tesla T4", "bf16"),
        ("NVIDIA H100 of tomorrow", "bf16"),
        ("", "bf16"),
    ],
)
def test_a_card_that_is_not_listed_has_no_peak(card: str, precision: str) -> None:
    assert peak_of(card, precision) is None


def test_time_step_says_them_and_of_which_peak() -> None:
    made = record()
    view = View(CASE, {"plain": made}, record=made)
    word = CHECKS["time.step"].judge(view)
    metrics = dict(word.metrics)
    # 2 tokens on each of 4 ranks in 10 ms; 2 Psi bytes reduce-scattered and gathered, 3/4 of each crossing the bus
    assert metrics["tokens_per_s"] == pytest.approx(800)
    assert metrics["bus_all-gather_bytes_per_s"] == pytest.approx(2 * PSI * 0.75 / 0.01)
    assert "mfu" not in metrics and any("no peak known for this device (cpu)" in line for line in word.detail)
    place = Place("cuda:0", "nccl", "gpu", "NVIDIA H200")
    made = record(change=lambda s: replace(s, place=place))
    word = CHECKS["time.step"].judge(View(CASE, {"plain": made}, record=made))
    assert dict(word.metrics)["mfu"] == pytest.approx(6 * PSI * 8 / 0.01 / (4 * 989.5e12))
    assert any("989.5 TFLOP/s" in line and "6 Psi" in line for line in word.detail)
