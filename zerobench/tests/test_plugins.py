"""Plug-ins as a newcomer writes them, by path, through the command line: a right one, unusable ones and a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerobench.cli import main

PLUGINS = Path(__file__).parent / "plugins"
KEPT = ("memory.at_rest", "traffic.volume", "numerics.gradient", "numerics.update", "numerics.adam")

SUITE = """
version: 1
suite: mistakes
about: Plug-ins with one mistake each.
launch: local
judge: claim
matrix:
  implementation: [{implementations}]
  model: [mlp-tiny]
  world_size: [2]
  precision: [fp32]
checks: [numerics.gradient, numerics.update]
"""


def conform(reference: str, tmp_path: Path, *checks: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code of `zerobench conform`, and its findings by check."""
    chosen = [word for check in checks for word in ("--check", check)]
    common = ["--world-size", "2", "--precision", "fp32", "--model", "mlp-tiny", "-q", "--results", str(tmp_path)]
    code = main(["conform", reference, *common, *chosen, "--json", str(tmp_path / "findings.jsonl")])
    return code, {f["check"]: f for f in findings(tmp_path)}


def findings(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]


def test_a_newcomers_ddp_passes(tmp_path: Path) -> None:
    code, found = conform(f"{PLUGINS / 'my_ddp.py'}:MyDdp", tmp_path, *KEPT)
    assert code == 0
    assert {check: f["status"] for check, f in found.items()} == dict.fromkeys((*KEPT, "runtime.completes"), "pass")


def test_a_copy_that_one_rank_keeps_is_recognised_by_its_content(tmp_path: Path) -> None:
    """Gathering what it may be a copy of is collective: ranks that hold nothing take part for one that does."""
    code, found = conform(f"{PLUGINS / 'hoards.py'}:Hoards", tmp_path, "memory.unclaimed")
    assert code == 1
    assert found["memory.unclaimed"]["status"] == "fail" and found["memory.unclaimed"]["ranks"] == [1]
    assert "weight" in found["memory.unclaimed"]["actual"] + " ".join(found["memory.unclaimed"]["detail"])


def test_a_class_without_build_is_refused_by_name(tmp_path: Path) -> None:
    code, found = conform(f"{PLUGINS / 'broken.py'}:WithoutBuild", tmp_path, "numerics.gradient")
    assert code == 1
    assert found["runtime.completes"]["status"] == "fail"
    assert "broken.py:WithoutBuild' lacks build()" in found["runtime.completes"]["actual"]
    assert found["numerics.gradient"]["status"] == "skip"


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """One run of all other mistakes: the exit code, and findings by (implementation, check)."""
    folder = tmp_path_factory.mktemp("mistakes")
    kinds = ("WithoutFullParameters", "MisspelledClaims", "EmptyPromise", "ForgetsToAverage")
    names = ", ".join(f"'{PLUGINS / 'broken.py'}:{kind}'" for kind in kinds)
    suite = folder / "mistakes.yaml"
    suite.write_text(SUITE.format(implementations=names))
    code = main(["run", str(suite), "-q", "--results", str(folder), "--json", str(folder / "findings.jsonl")])
    return code, {(f["case"].split("/")[0], f["check"]): f for f in findings(folder)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("without-full-parameters", ("Unfinished", "lacks full_parameters()")),
        ("misspelled-claims", ("unknown features ['clip']", "Claims.padding_numel", "not -1")),
        ("empty-promise", ("claims announce what it lacks", "save() ('checkpoint')", "load() ('checkpoint')")),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_is_missing(
    mistakes: tuple[int, dict[tuple[str, str], dict[str, Any]]], name: str, said: tuple[str, ...]
) -> None:
    code, found = mistakes
    refusal = found[name, "runtime.completes"]
    assert code == 1
    assert refusal["status"] == "fail"
    assert [part for part in said if part not in refusal["actual"]] == []
    assert found[name, "numerics.gradient"]["status"] == "skip"  # no step ran


def test_a_sum_that_should_be_a_mean_fails_by_its_factor(
    mistakes: tuple[int, dict[tuple[str, str], dict[str, Any]]],
) -> None:
    _, found = mistakes
    assert found["forgets-to-average", "runtime.completes"]["status"] == "pass"
    for check in ("numerics.gradient", "numerics.update"):
        assert found["forgets-to-average", check]["status"] == "fail"
    assert "too large by n" in found["forgets-to-average", "numerics.gradient"]["actual"]
