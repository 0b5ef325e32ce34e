"""Simulated ranks against real ones, and what a simulated record may and may not prove."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerobench.case import Case
from zerobench.judge import judge
from zerobench.launch.local import Local
from zerobench.launch.simulate import Simulate, chosen_ranks
from zerobench.record import Record, Sample
from zerobench.report.terminal import verdict_lines
from zerobench.terms import Moment

DEADLINE_S = 100.0
HERE = Path(__file__).parent
IMPLEMENTATIONS = ["ddp", "zero1", "zero2", "zero3", "torch-ddp", "torch-ddp-no-views", "torch-zero"]
IMPLEMENTATIONS += ["fsdp2", "fsdp2-no-reshard", "fsdp2-root-default", "hsdp2"]


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local() as local:
        yield local


@pytest.fixture(scope="module")
def simulate() -> Iterator[Simulate]:
    with Simulate() as simulate:
        yield simulate


def case(name: str, n: int, model: str = "gpt-tiny", **more: Any) -> Case:
    """A simulated case of two steps, the second measured."""
    return Case(name.rpartition(":")[2].lower(), name, model, n, "bf16", measured=1, launch="simulate", **more)


def launched(launcher: Local, what: Case, scenario: str = "plain") -> Record:
    return launcher.launch(what.run(scenario), deadline_s=DEADLINE_S)


# -- simulation agrees with reality ------------------------------------------------------------------------------------


def exact(sample: Sample) -> dict[Any, Any]:
    """What follows from shapes, dtypes and the program: every call (the suite's own reading of states left out, which
    a simulation has not), every claimed byte by dtype, the elements updated, the state left behind."""
    calls = [c for c in sample.calls if c.phase != "read"]
    held = {(h.step, h.moment): (h.claimed, h.dtypes, h.scalars) for h in sample.holdings}
    return {"calls": calls, "held": held, "updated": sample.updated_numel, "changed": sample.changed}


def alive(sample: Sample) -> dict[Any, int]:
    """Live bytes at moments, between units and at their highest. On real ranks a thread of gloo may hold a tensor for
    a moment longer. What gloo itself makes inside a collective (`Peak.backend`) has no counterpart and is left out."""
    found: dict[Any, int] = {}
    for h in sample.holdings:
        found[h.step, h.moment, "live"], found[h.step, h.moment, "unclaimed"] = h.live, h.unclaimed
    for p in sample.peaks:
        found[p.step, p.phase, "peak"] = p.nbytes - p.backend
    passed = Counter((b.phase, b.unit) for b in sample.boundaries)
    assert set(passed.values()) == {1}
    for b in sample.boundaries:
        found[b.phase, b.unit, "live"], found[b.phase, b.unit, "bare"] = b.live, b.bare
    return found


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_simulated_equals_measured_byte_for_byte_and_call_for_call(local: Local, simulate: Simulate, name: str) -> None:
    for n in (4,) if name == "hsdp2" else (2, 3, 4):
        fake = launched(simulate, case(name, n))
        assert (fake.status, fake.reason, fake.faked) == ("ok", "", ())
        assert [s.rank for s in fake.samples] == list(range(n))
        real = [launched(local, replace(case(name, n), launch="local"))]
        assert (real[0].claims, real[0].model) == (fake.claims, fake.model)
        for rank, sample in enumerate(fake.samples):
            assert exact(real[0].samples[rank]) == exact(sample), (n, rank)
            while (apart := _apart([alive(r.samples[rank]) for r in real], alive(sample))) and len(real) < 4:
                real.append(launched(local, replace(case(name, n), launch="local")))
            assert not apart, (n, rank, apart)


def _apart(real: list[dict[Any, int]], fake: dict[Any, int]) -> dict[Any, tuple[int, int]]:
    """(least of the launches, simulated) where they differ."""
    least = {key: min(launch[key] for launch in real) for key in real[0]}
    assert least.keys() == fake.keys()
    return {key: (least[key], fake[key]) for key in fake if least[key] != fake[key]}


# -- large worlds ------------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_rank_of_a_large_world_run(simulate: Simulate) -> None:
    record = launched(simulate, case("zero3", 1024, "gpt-small"))
    assert [s.rank for s in record.samples] == [0, 1023] == list(chosen_ranks(1024))
    assert record.status == "ok" and record.partial
    again = Record.from_json(record.to_json())
    assert [(s.calls, s.holdings, s.peaks) for s in again.samples] == [
        (s.calls, s.holdings, s.peaks) for s in record.samples
    ]
    assert {len(c.group) for s in record.samples for c in s.calls} == {1024}
    assert record.model is not None and record.claims is not None
    first, last = ([h for h in s.holdings if h.moment is Moment.BACKWARD][-1].claimed for s in record.samples)
    share = sum(first.values()) / 16  # 2 + 2 + 12 bytes an element
    assert record.model.psi / 1024 <= share <= record.model.psi / 1024 + record.claims.padding_numel
    assert sum(last.values()) < sum(first.values())  # some of its elements are padding, which has no moments


def test_stage_2_in_name_only_fails_with_its_peak_named(simulate: Simulate) -> None:
    """It reduces one full gradient after backward: at rest it is stage 2, inside backward it holds 2 Psi bytes more."""
    both = [case("zero2", 64, "gpt-small"), case("zerobench.mutants.memory:ReduceAfterBackward", 64, "gpt-small")]
    records = {r.id: r for each in both if (r := launched(simulate, each))}
    checks = ["memory.at_rest", "memory.gradient_peak"]
    found = {(f.case, f.check): f for f in judge("s", both, checks, records).findings}
    assert [found[c.id, "memory.at_rest"].status.value for c in both] == ["pass", "pass"]
    assert [found[c.id, "memory.gradient_peak"].status.value for c in both] == ["pass", "fail"]
    word = found[both[1].id, "memory.gradient_peak"]
    assert "on ranks 0,63" in word.actual and "at the boundary after block" in word.actual
    assert dict(word.metrics)["bytes"] > 1.2 * records[both[1].run("plain").id].model.psi  # type: ignore[union-attr]


# -- what cannot be known ----------------------------------------------------------------------------------------------


def test_a_made_up_value_makes_the_record_provisional(simulate: Simulate) -> None:
    peeking = case(f"{HERE / 'plugins' / 'peeks.py'}:Peeks", 2)
    record = launched(simulate, peeking)
    assert record.status == "ok"
    assert record.faked == ("aten._local_scalar_dense.default at peeks.py:14, 2 times",)
    verdict = judge("s", [peeking], ["memory.at_rest", "traffic.volume"], {record.id: record})
    for finding in verdict.findings:
        if finding.check != "runtime.completes":
            assert finding.actual.endswith("; provisional, 1 value made up")
            assert f"made up: {record.faked[0]}" in finding.detail
    told = "\n".join(verdict_lines(verdict, [peeking], {record.id: record}, False))
    assert "pass, provisional" in told and "peeks.py:14" in told and "tensors without memory" in told


def test_who_does_not_claim_to_be_simulable_is_skipped(simulate: Simulate) -> None:
    record = launched(simulate, case("fsdp1-full", 2))
    assert (record.status, record.reason) == ("skip", "unsupported: simulable")
    assert launched(simulate, case("zero2", 2), "dyadic").reason.startswith("simulated: ")


def test_the_command_line_runs_a_simulated_suite_without_torch(tmp_path: Path) -> None:
    text = """
    version: 1
    suite: tiny
    launch: simulate
    matrix: {implementation: [zero2], model: [gpt-tiny], world_size: [512], precision: [fp16]}
    checks: [memory.at_rest, traffic.volume, numerics.gradient, time.step]
    """
    (tmp_path / "tiny.yaml").write_text(text.replace("\n    ", "\n"))
    code = (
        "import sys; from zerobench.cli import main; "
        "code = main(['run', 'tiny.yaml', '-q']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (
        "zero2/gpt-tiny/n512/fp16/simulated" in done.stdout and "of n = 512 the first and the last rank" in done.stdout
    )
    assert "2 pass, 3 skip" in done.stdout
