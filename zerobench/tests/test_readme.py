"""The README is true: its example runs, its commands exist, its exit codes and figures are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from zerobench.cli import EXIT_CODES, main, parser

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="the README is in the checkout only")


def text() -> str:
    return README.read_text(encoding="utf-8")


def commands() -> list[str]:
    """Lines of indented blocks that start with `zerobench`, up to two spaces before a description."""
    found = [line.strip() for line in text().splitlines() if line.startswith("    zerobench ")]
    return [re.split(r"\s{2,}", line)[0] for line in found]


def test_the_plug_in_of_the_readme_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", text(), re.DOTALL)
    assert code is not None and len(code[1].splitlines()) < 60
    (tmp_path / "my_ddp.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    checks = [
        word for check in ("memory.at_rest", "traffic.volume", "numerics.gradient") for word in ("--check", check)
    ]
    assert main(["conform", "./my_ddp.py:MyDdp", "--world-size", "2", "--precision", "fp32", "-q", *checks]) == 0


def test_every_command_of_the_readme_is_one() -> None:
    assert len(commands()) > 8
    for line in commands():
        words = shlex.split(line.replace("SUITE...", "smoke").replace("|", " "))[1:]
        known = {a for action in parser()._actions for a in (action.choices or {})}
        assert words[0] in known, line


def test_the_set_up_commands_are_environments_of_tox() -> None:
    tox = (ROOT / "tox.ini").read_text()
    environments = re.findall(r"\.venv/bin/tox -e ([a-z0-9-]+)", text())
    assert {"smoke", "cpu"} <= set(environments)
    for name in environments:
        assert name == "cpu" or f"[testenv:{name}]" in tox, name


def test_ci_runs_the_readmes_test_command() -> None:
    wanted = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox -e cpu"
    assert wanted in text()
    assert wanted in (ROOT / ".ci" / "run").read_text().replace(" --quiet", "")


def test_the_exit_codes_are_those_of_the_help() -> None:
    words = {code: said for code, said in re.findall(r"(\d+) ([a-z][a-z ,]*[a-zA-Z])", EXIT_CODES)}
    listed = re.sub(r"\s+", " ", text())
    for code, said in words.items():
        assert f"{code} {said}" in listed, (code, said)


def test_linked_files_are_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text()):
        assert (ROOT / target).exists(), target


def test_the_tree_of_the_readme_is_the_tree() -> None:
    block = text().split("## What is where")[1]
    named = set(re.findall(r"^    ([a-z]+)/ ", block, re.MULTILINE))
    files = set(re.findall(r"\b([A-Za-z]+\.(?:ini|toml|md)|LICENSE)\b", block.split("Apache")[0]))
    assert named | files
    for name in named | files:
        assert (ROOT / name).exists(), name
    there = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "_")) and "egg" not in p.name}
    assert named <= there and {"zerobench", "suites", "examples", "baselines", "results"} == named
