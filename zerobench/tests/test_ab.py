"""A comparison end to end: who is launched when, what is stored, and that the stored file says the same again."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from zerobench import commands
from zerobench.ab import Launches, Side, cases_json, compare, judge_stored, measure, suite_of
from zerobench.case import Case, Run
from zerobench.checks.pairs import SIDES
from zerobench.finding import Status
from zerobench.launch.elsewhere import Elsewhere
from zerobench.launch.nursery import LaunchError
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.progress import Progress
from zerobench.store import StoreError, read
from zerobench.tests.made import record

BASE, HEAD = (Case(name, name, "gpt-tiny", 2).run("timed") for name in ("ddp", "zero2"))
RUNS = [(BASE, HEAD)]


class Fake:
    """A launcher whose k-th launch takes the k-th of `seconds`, the last one for ever."""

    def __init__(self, seconds: Iterable[float], status: str = "ok") -> None:
        self.seconds, self.status, self.launched = list(seconds), status, 0

    def launch(self, run: Run, *, deadline_s: float, suite: str = "") -> Record:
        time_s = self.seconds[min(self.launched, len(self.seconds) - 1)]
        self.launched += 1
        made = record("timed", run.case, change=lambda s: replace(s, times_s=(time_s,) * 3))
        return replace(made, suite=suite, run=run, status=self.status, reason="why")


def compared(tmp_path: Path, base: Fake, head: Fake, runs: list[tuple[Run, Run]] = RUNS):
    sides = {
        side: Side(launcher, collect(suite=suite_of(side), suite_digest="", cases=cases_json(runs)[side]))
        for side, launcher in zip(SIDES, (base, head), strict=True)
    }
    progress = Progress(0, sys.stderr, quiet=True)
    return compare(runs, sides, results=tmp_path, progress=progress, deadline_s=10.0)


def test_sides_and_cells_take_turns() -> None:
    second = tuple(replace(run, case=replace(run.case, model="mlp-tiny")) for run in (BASE, HEAD))
    order: list[str] = []

    def launch(side: str, run: Run, left: int) -> Record:
        order.append(f"{side[0]} {run.case.model[0]}")
        return Fake([0.01]).launch(run, deadline_s=1.0)

    launches: Launches = {"base": [], "head": []}
    measure([(BASE, HEAD), second], launch, launches, 14)
    assert order[:8] == ["b g", "h g", "b m", "h m", "h g", "b g", "h m", "b m"]
    assert len(order) == 2 * 2 * 5  # equal sides: five pairs a cell


@pytest.mark.parametrize(
    ("head", "status", "pairs"),
    [([0.010], Status.PASS, 5), ([0.016], Status.FAIL, 14), ([0.01, 0.02], Status.FAIL, 18)],
)
def test_a_stored_comparison_is_judged_alike(tmp_path: Path, head: list[float], status: Status, pairs: int) -> None:
    done = compared(tmp_path, Fake([0.010]), Fake(head))
    results = read(done.path)
    assert [f.status for f in done.findings] == [status]
    assert judge_stored(results) == done.findings
    assert {side: len(results.launches[run.id]) for side, run in zip(SIDES, (BASE, HEAD), strict=True)} == {
        "base": pairs,
        "head": pairs,
    }


def test_one_implementation_in_two_environments_keeps_its_sides_apart(tmp_path: Path) -> None:
    done = compared(tmp_path, Fake([0.010]), Fake([0.012]), [(HEAD, HEAD)])
    (finding,) = judge_stored(read(done.path))
    assert (finding.check, finding.status) == ("time.regression", Status.FAIL)
    assert dict(finding.metrics)["ratio"] == pytest.approx(1.2)
    assert [finding] == done.findings


def test_a_launch_that_fails_ends_its_cell(tmp_path: Path) -> None:
    head = Fake([0.01], status="error")
    done = compared(tmp_path, Fake([0.01]), head)
    assert (head.launched, done.findings[0].check, done.findings[0].status) == (1, "runtime.completes", Status.FAIL)
    assert judge_stored(read(done.path)) == done.findings


def test_an_interrupted_comparison_keeps_what_it_has(tmp_path: Path) -> None:
    class Interrupted(Fake):
        def launch(self, run: Run, *, deadline_s: float, suite: str = "") -> Record:
            if self.launched == 3:
                raise KeyboardInterrupt
            return super().launch(run, deadline_s=deadline_s, suite=suite)

    done = compared(tmp_path, Fake([0.01]), Interrupted([0.01]))
    assert done.interrupted
    assert done.findings[0].status is Status.INCONCLUSIVE
    assert judge_stored(read(done.path)) == done.findings


def test_half_a_comparison_is_refused(tmp_path: Path) -> None:
    done = compared(tmp_path, Fake([0.01]), Fake([0.01]))
    lines = done.path.read_text().splitlines()
    head = read(done.path).provenance.id
    done.path.write_text("".join(line + "\n" for line in lines if head not in line))
    with pytest.raises(StoreError, match="head"):
        judge_stored(read(done.path))


def test_report_says_what_ab_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = compared(tmp_path, Fake([0.01]), Fake([0.016]))
    out = tmp_path / "findings.jsonl"
    arguments = argparse.Namespace(
        result=str(done.path), judge=None, strict=False, json=str(out), html=None, markdown=None
    )
    assert commands.report(arguments) == 1  # a SHOULD, and yet it counts: it is what was asked
    assert json.loads(out.read_text())["id"] == "ab::zero2/gpt-tiny/n2/fp32::time.relative"
    assert "+60.0 %" in capsys.readouterr().out


def test_another_interpreter_launches_and_ends() -> None:
    """Real ranks by way of `python -m zerobench serve`; a bad order is answered and does not end it."""
    with Elsewhere(Path(sys.executable), "ab-head") as elsewhere:
        assert elsewhere.about.suite == "ab-head"
        unknown = replace(HEAD, scenario="no-such-scenario")
        with pytest.raises(LaunchError, match="no-such-scenario"):
            elsewhere.launch(unknown, deadline_s=60.0)
        run = Case("zero2", "zero2", "mlp-tiny", 1).run("timed")
        made = elsewhere.launch(run, deadline_s=60.0, suite="ab-head")
        process = elsewhere._process
    assert (made.status, made.suite) == ("ok", "ab-head")
    assert len(made.samples[0].times_s) > 15  # which take some 30 ms: more are timed, for a second or so
    assert process.poll() == 0


def test_an_interpreter_that_cannot_serve_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-python"):
        Elsewhere(tmp_path / "no-python", "ab-base")
    for script, said in (("echo hello", "'hello"), ("exit 7", "exit code 7")):
        other = tmp_path / "other"
        other.write_text(f"#!/bin/sh\n{script}\n")
        other.chmod(0o755)
        with pytest.raises(LaunchError, match=said):
            Elsewhere(other, "ab-base")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base", "zero22", "--head", "zero2"], "did you mean"),
        (["--base", "zero2", "--head", "zero2", "--model", "mlp-9m"], "unknown model"),
        (["--base", "zero2", "--head", "zero2", "--device", "shared-gpu"], "share a GPU"),
        (["--base", "zero2", "--head", "zero2", "--rounds", "4"], "from 5 to 14"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "zerobench", "ab", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
