"""The self-test loses nothing, says what it left out, and fails on a survivor and on a false alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zerobench.case import Case
from zerobench.cli import main
from zerobench.launch.local import Local
from zerobench.mutants.names import MUTANTS
from zerobench.scenarios import SCENARIOS
from zerobench.selftest import Trial, report
from zerobench.tests.made import CASE, record

MUTANT = Trial((CASE,), (), next(iter(MUTANTS.values())))


def test_an_interrupted_one_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "-k", "rates-shift", "--results", str(tmp_path)]) == 0
    whole = capsys.readouterr()
    assert "only -k rates-shift" in whole.out and "[2/2]" in whole.err
    (path,) = tmp_path.glob("selftest-*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # who measured, and one run of two
    assert main(["selftest", "-k", "rates-shift", "--resume", str(path)]) == 0
    rest = capsys.readouterr()
    assert rest.out == whole.out and "[1/1]" in rest.err


def test_seconds_are_taken_of_correct_implementations_alone() -> None:
    """A mutant's bare steps judge nothing: no killer reads seconds."""
    with Local() as local:
        for trial, steps in ((Trial((CASE,), ()), SCENARIOS["plain"].timed), (MUTANT, 0)):
            made = local.launch(CASE.run("plain"), deadline_s=60, target=trial.target)
            assert [len(sample.times_s) for sample in made.samples] == [steps] * CASE.world_size, made.reason


def test_what_is_no_self_test_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "-k", "rates-shift", "--resume", str(tmp_path / "absent.jsonl")]) == 3
    assert "absent.jsonl" in capsys.readouterr().err


def test_a_survivor_and_a_false_alarm_are_defects(capsys: pytest.CaptureFixture[str]) -> None:
    """A mutant that did nothing wrong survives; a correct implementation that holds too much is an alarm."""
    mutant = replace(MUTANTS["replicated-moments"], world_size=4)
    case = Case(mutant.name, mutant.reference, "gpt-tiny", 4, "bf16")
    harmless = record(case=case)
    assert report([Trial((case,), mutant.killers, mutant)], {harmless.id: harmless}) == 1
    assert "survives memory.at_rest" in capsys.readouterr().out
    heavy = record(
        change=lambda s: replace(
            s, holdings=tuple(replace(h, claimed={k: 2 * v for k, v in h.claimed.items()}) for h in s.holdings)
        )
    )
    assert report([Trial((CASE,), ("memory.at_rest",))], {heavy.id: heavy}) == 1
    assert "false alarm on zero2" in capsys.readouterr().out
    right = record()
    assert report([Trial((CASE,), ("memory.at_rest",))], {right.id: right}) == 0
