"""The command line as a user meets it: help, listings, exit codes, errors that say where and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerobench.cli import main
from zerobench.codec import encode
from zerobench.record import Provenance
from zerobench.store import Writer
from zerobench.tests.made import CASE, record


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "zerobench", *words], capture_output=True, text=True, timeout=60)


def stored(folder: Path, *records: object, checks: tuple[str, ...] = ("memory.at_rest",)) -> Path:
    about = Provenance(
        "p", "0", "made", "", "host", "2026-01-01T00:00:00+00:00", cases=(encode(CASE),), checks=checks, judge="paper"
    )
    path = folder / "made.jsonl"
    with Writer(path) as writer:
        writer.write(about)
        for item in records:
            writer.write(item)  # type: ignore[arg-type]
    return path


def test_help_imports_no_torch_and_names_every_command() -> None:
    code = (
        "import sys; sys.argv = ['zerobench', '--help']\n"
        "from zerobench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'pydantic', 'yaml'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    for command in ("run", "conform", "report", "predict", "list", "validate", "schema", "spec", "selftest"):
        assert command in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "smok"), "did you mean 'smoke'"),
        (("conform", "zero22"), "did you mean 'zero2'"),
        (("conform", "zero2", "--check", "memory.at_res"), "did you mean 'memory.at_rest'"),
        (("conform", "zero2", "--model", "gpt-tin"), "did you mean 'gpt-tiny'"),
        (("conform", "zero2", "--option", "nonsense"), "K=V"),
        (("conform", "./no_such.py:Zero"), "there is no file"),
        (("run", "smoke", "-i", "zero22"), "did you mean 'zero2'"),
        (("run", "smoke", "-i", "./no_such.py:Zero"), "there is no file"),
        (("predict", "--params", "many", "--world-size", "4"), "a count such as"),
        (("report", "no-such.jsonl"), "no-such.jsonl"),
    ],
)
def test_usage_errors_exit_2_and_say_what_was_meant(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_bad_suite_shows_every_mistake_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "version: 1\nsuite: bad\nmatrix:\n  implementation: [zero22]\n  model: [gpt-tiny]\n  world_size: [0]\n"
        "  precision: [bf16]\nchecks: [memory.at_res]\nchekcs: []\n"
    )
    assert main(["validate", str(path)]) == 2
    told = capsys.readouterr().err
    for place in (":4:20: matrix.implementation", ":6:16: matrix.world_size", ":8:10: checks", ":9:1: chekcs"):
        assert place in told, told


def test_nothing_selected_is_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smoke", "-k", "no-such-case"]) == 5


def test_a_verdict_is_recomputed_from_the_file_alone(tmp_path: Path) -> None:
    path = stored(tmp_path, record())
    code = (
        "import sys, builtins\n"
        "real = builtins.__import__\n"
        "def no_torch(name, *rest, **more):\n"
        "    assert name.split('.')[0] != 'torch', 'torch was imported'\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = no_torch\n"
        "from zerobench.cli import main\n"
        f"raise SystemExit(main(['report', {str(path)!r}, '--json', {str(tmp_path / 'out.json')!r}]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines()]
    assert [(line["id"], line["status"]) for line in lines] == [
        ("made::zero2/gpt-tiny/n4/bf16::memory.at_rest", "pass"),
        ("made::zero2/gpt-tiny/n4/bf16::runtime.completes", "pass"),
    ]
    assert set(lines[0]) >= set(
        [
            "id",
            "suite",
            "case",
            "check",
            "status",
            "claim",
            "paper",
            "requirement",
            "expected",
            "actual",
            "relation",
            "ranks",
        ]
    )


def test_a_cut_off_file_is_not_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, record())
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["report", str(path)]) == 3
    said = capsys.readouterr()
    assert "cut off" in said.err and "not run" in said.out


def test_control_characters_of_a_stranger_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, record(status="error", reason="\x1b[2Jgone\x07"))
    assert main(["report", str(path)]) == 1
    assert "\x1b[2J" not in capsys.readouterr().out


def test_predict_prints_the_papers_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--params", "7.5e9", "--world-size", "64"]) == 0
    told = capsys.readouterr().out
    for figure in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB"):
        assert figure in told


@pytest.mark.parametrize("what", ["suites", "implementations", "models", "checks", "mutants"])
def test_listings_line_up(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    second = lines[0].index(lines[0].split()[1])
    assert all(line[second - 2 : second] == "  " for line in lines)


def test_spec_lists_every_check_once_with_its_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    from zerobench.checks.catalogue import CHECKS

    assert main(["spec"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert [h.split()[1] for h in headings] == list(CHECKS)


def test_a_reader_that_goes_away_is_no_error() -> None:
    found = subprocess.run(
        f"{sys.executable} -m zerobench spec | head -1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and "Traceback" not in found.stderr


def test_a_name_that_cannot_stand_in_ids_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise SystemExit('it ran')")
    assert main(["conform", "mine.py:Ü"]) == 2
    assert "names that stand in ids are of [a-z0-9-]+" in capsys.readouterr().err
    assert not Path("results").exists()
