"""A suite is a test file. Most of it is shown without a rank, by records made by hand; the rest is trained for real."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CASE = "zero2/mlp-tiny/n4/bf16"
SUITE = """\
version: 1
suite: small
matrix:
  implementation: [{implementations}]
  model: [mlp-tiny]
  world_size: [{n}]
  precision: [bf16]
checks:
{checks}
"""
MADE = """
import pytest
from dataclasses import replace
from zerobench.launch.local import Local
from zerobench.tests import made

def launch(self, run, *, deadline_s, suite=""):
    with open("launched", "a") as log:
        print(run.id, file=log)
    if run.case.implementation == "zero3":
        return replace(made.record(case=run.case), status="skip", reason="unsupported: luck", samples=(), run=run)
    change = fuller if run.case.implementation == "ddp" else lambda sample: sample
    return replace(made.record(case=run.case, change=change), run=run)

def fuller(sample):
    held = (replace(h, claimed=dict(h.claimed) | {"parameter": 5 * made.PSI}) for h in sample.holdings)
    return replace(sample, holdings=tuple(held))

Local.launch = launch

@pytest.fixture(autouse=True)
def visited(request):
    yield
    with open("visited", "a") as log:
        print(request.node.name, file=log)
"""
"""A conftest that puts records made by hand where ranks would train: ddp holds too much, zero3 is skipped."""


def suite_text(*checks: str, implementations: str = "zero2", n: int = 4, more: str = "") -> str:
    return SUITE.format(implementations=implementations, n=n, checks="\n".join(f"  - {c}" for c in checks)) + more


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Path:
    """suites/small.yaml over made records: at rest and step time of zero2, ddp (fails) and zero3 (skipped)."""
    pytester.makeconftest(MADE)
    path = pytester.mkdir("suites") / "small.yaml"
    path.write_text(suite_text("memory.at_rest", "time.step", implementations="zero2, ddp, zero3"))
    return path


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=60)


def cases(path: Path) -> dict[str, ElementTree.Element]:
    """The test cases of a JUnit file by classname::name."""
    return {f"{c.get('classname')}::{c.get('name')}": c for c in ElementTree.parse(path).iter("testcase")}


def properties(case: ElementTree.Element) -> dict[str, str]:
    return {p.get("name", ""): p.get("value", "") for p in case.iter("property")}


def test_ids_are_the_suites_path_and_the_findings_own(pytester: pytest.Pytester, suite: Path) -> None:
    done = run(pytester, "suites/small.yaml", "--co", "-q")
    assert done.ret == 0
    for check in ("memory.at_rest", "time.step", "runtime.completes"):
        done.stdout.fnmatch_lines([f"suites/small.yaml::{CASE}::{check}"])
    done.stdout.fnmatch_lines(["9 tests collected*"])
    assert not Path("launched").exists()
    chosen = run(pytester, "suites", "--co", "-q", "-k", "zero2 and not memory.at_rest", "-m", "zerobench")
    chosen.stdout.fnmatch_lines(["2/9 tests collected*"])
    one = run(pytester, f"suites/small.yaml::{CASE}::memory.at_rest", "-v")
    one.assert_outcomes(passed=1)
    assert Path("launched").read_text() == f"{CASE}@plain\n"


def test_outcomes_reasons_and_junit(pytester: pytest.Pytester, suite: Path) -> None:
    done = run(pytester, "suites/small.yaml", "-rs", "--junitxml", "j.xml")
    done.assert_outcomes(passed=5, failed=1, skipped=3)
    done.stdout.fnmatch_lines(
        ["FAIL small::ddp/mlp-tiny/n4/bf16::memory.at_rest", "*requirement *", "*expected *", "*actual *"]
    )
    done.stdout.fnmatch_lines(["SKIPPED [[]1[]] suites/small.yaml:9: unsupported: luck"])
    assert "Traceback" not in str(done.stdout)
    runs = Path("launched").read_text().splitlines()
    assert len(runs) == len(set(runs)) == 3  # one run serves all items of its case
    assert Path("visited").read_text().splitlines().count("memory.at_rest") == 3  # fixtures work on items

    found = cases(Path("j.xml"))
    bad = found["suites.small.yaml.ddp/mlp-tiny/n4/bf16::memory.at_rest"]
    told = properties(bad)
    assert told["id"] == "small::ddp/mlp-tiny/n4/bf16::memory.at_rest" and told["status"] == "fail"
    failure = bad.find("failure")
    assert failure is not None and failure.text is not None
    for key in ("requirement", "expected", "actual"):
        assert told[key] and told[key] in failure.text
    assert properties(found[f"suites.small.yaml.{CASE}::memory.at_rest"])["status"] == "pass"
    skip = found["suites.small.yaml.zero3/mlp-tiny/n4/bf16::memory.at_rest"].find("skipped")
    assert skip is not None and skip.get("message") == "unsupported: luck"


def test_stop_at_the_first_and_last_failed(pytester: pytest.Pytester, suite: Path) -> None:
    done = pytester.runpytest_subprocess("suites/small.yaml", "-x", timeout=60)
    done.assert_outcomes(passed=3, failed=1)
    again = pytester.runpytest_subprocess("suites/small.yaml", "--lf", "-q", timeout=60)
    again.assert_outcomes(failed=1)


def test_xfail_and_a_stale_one(pytester: pytest.Pytester, suite: Path) -> None:
    excuses = "".join(
        f"  - {{implementation: {name}, check: memory.at_rest, reason: holds a copy}}\n" for name in ("ddp", "zero2")
    )
    suite.write_text(suite_text("memory.at_rest", implementations="zero2, ddp", more="xfail:\n" + excuses))
    done = run(pytester, "suites/small.yaml", "--junitxml", "j.xml")
    done.assert_outcomes(passed=2, xfailed=1, failed=1)  # runtime.completes twice
    done.stdout.fnmatch_lines(["*XPASS(strict)*holds a copy*"])
    assert properties(cases(Path("j.xml"))[f"suites.small.yaml.{CASE}::memory.at_rest"])["status"] == "xpass"


def test_a_broken_suite_is_a_collect_error_with_every_place(pytester: pytest.Pytester, suite: Path) -> None:
    suite.write_text(suite_text("memory.at_rst", more="wat: 1\n"))
    done = run(pytester, "suites/small.yaml")
    assert done.ret == 2
    done.stdout.fnmatch_lines(
        ["suites/small.yaml:9:5: checks.0: unknown check*memory.at_rest*", "suites/small.yaml:10:1: wat: unknown key*"]
    )
    assert "Traceback" not in str(done.stdout)


def test_other_peoples_files_are_left_alone_and_cost_nothing(pytester: pytest.Pytester) -> None:
    text = suite_text("memory.at_rest")
    pytester.mkdir("config")
    Path("config/small.yaml").write_text(text)  # a suite, but nobody named it
    pytester.mkdir("suites")
    Path("suites/compose.yaml").write_text("version: '3'\nservices: {}\n")
    pytester.makepyfile(
        """
        import sys
        def test_it():
            heavy = {"torch", "pandas", "pydantic", "yaml", "zerobench.suite"} & set(sys.modules)
            assert "zerobench.pytest_plugin" in sys.modules and not heavy, heavy
        """
    )
    run(pytester, "-p", "no:hypothesispytest").assert_outcomes(passed=1)
    named = run(pytester, "config/small.yaml", "--co", "-q")
    assert f"config/small.yaml::{CASE}::memory.at_rest" in str(named.stdout)


def test_pytest_benchmark_gets_the_samples_of_the_ranks(pytester: pytest.Pytester, suite: Path) -> None:
    done = run(pytester, "suites/small.yaml", "-k", "zero2", "--benchmark-json", "b.json")
    done.assert_outcomes(passed=3)
    stored = json.loads(Path("b.json").read_text())
    (one,) = stored["benchmarks"]
    assert one["stats"]["data"] == [0.01] * 7  # to the last bit: as the record has them
    assert (one["name"], one["group"]) == (CASE, "small") and one["options"]["timer"] == "zerobench.rank_clock"
    info = one["extra_info"]
    assert info["bytes"]["optimizer"] == [3600] * 4 and info["collectives"]["all-gather bf16 calls"] == [4] * 4
    assert info["fingerprints"]["replicated parameter, step 3"] == "bits3" and info["versions"]["zerobench"]
    assert stored["zerobench"]["zerobench"] == info["versions"]["zerobench"]
    Path("c.json").write_text(Path("b.json").read_text())
    compared = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", "b.json", "c.json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert compared.returncode == 0 and compared.stdout.count(CASE) == 2
    for absent in ("--benchmark-disable", "-pno:benchmark"):
        run(pytester, "suites/small.yaml", "-k", "zero2 and time.step", absent).assert_outcomes(passed=1)


REPLAY = """
from pathlib import Path
from zerobench.launch.local import Local
from zerobench.store import read

(file,) = Path("v1").glob("*.jsonl")
Local.launch = lambda self, run, **_: read(file).records[run.id]
"""
"""A conftest that hands out what the ranks of version 1 left behind, so that they train once."""
UPGRADES = (
    "from zerobench.implementations.reference import Zero2 as MyZero\n",
    "from zerobench.mutants.memory import ReplicatedMoments as MyZero\n",
)


def zerobench(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of the command, in a process of its own: pytester forgets what is imported here."""
    done = subprocess.run(
        [sys.executable, "-m", "zerobench", *arguments], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.timeout(300)
def test_an_upgrade_that_changes_bytes_is_the_same_red_everywhere(pytester: pytest.Pytester) -> None:
    """A run, an accepted baseline, an upgrade: every check still passes, and the comparison is red, by one id."""
    Path("mine.yaml").write_text(suite_text("traffic.volume", implementations="'./my_zero.py:MyZero'", n=2))

    def train(version: int) -> str:
        Path("my_zero.py").write_text(UPGRADES[version])
        assert zerobench("run", "mine.yaml", "--results", f"v{version}", "-q")[0] == 0
        (file,) = Path(f"v{version}").glob("*.jsonl")
        return str(file)

    assert zerobench("accept", train(0), "--bytes")[0] == 0
    code, terminal = zerobench("compare", train(1), "--bytes", "--json", "found.json")
    findings = [json.loads(line) for line in Path("found.json").read_text().splitlines()]
    (red,) = [f for f in findings if f["status"] == "fail"]
    assert code == 1 and red["id"] == "small::my-zero/mlp-tiny/n2/bf16::baseline.bytes"
    assert "optimizer" in red["actual"] + " ".join(red["detail"]) and red["ranks"] == [0, 1]

    pytester.makeconftest(REPLAY)
    done = run(pytester, "mine.yaml", "--zb-baseline", "baselines", "--junitxml", "j.xml")
    done.assert_outcomes(passed=3, failed=1)  # traffic.volume, runtime.completes, baseline.traffic
    junit = cases(Path("j.xml"))["mine.yaml.my-zero/mlp-tiny/n2/bf16::baseline.bytes"]
    told, failure = properties(junit), junit.find("failure")
    assert failure is not None and failure.text is not None
    for key in ("id", "requirement", "expected", "actual"):
        assert told[key] == red[key] and red[key] in terminal and red[key] in failure.text
        assert red[key] in str(done.stdout)


def test_a_baseline_that_is_absent_or_broken_stops_collection(pytester: pytest.Pytester, suite: Path) -> None:
    done = run(pytester, "suites/small.yaml", "--zb-baseline", "nowhere")
    assert done.ret == 2
    done.stdout.fnmatch_lines(["*nowhere/bytes/small.json: no such baseline; make it: zerobench accept RESULT --bytes"])
    Path("b.json").write_text("{}")
    done = run(pytester, "suites/small.yaml", "--zb-baseline", "b.json")
    assert done.ret == 2
    done.stdout.fnmatch_lines(["b.json:1: not a baseline of zerobench; make it again: zerobench accept RESULT"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads the process table of Linux")
def test_a_killed_pytest_leaves_nobody_behind(pytester: pytest.Pytester) -> None:
    Path("hang.yaml").write_text(
        suite_text("traffic.volume", implementations="'zerobench.mutants.runtime:OneRankHangs'", n=2)
    )
    tests = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "hang.yaml"], stdout=subprocess.DEVNULL)
    here = str(pytester.path)
    try:
        deadline = time.monotonic() + 60
        while len(at_work(here)) < 4 and time.monotonic() < deadline:  # pytest, the fork server, two ranks
            time.sleep(0.1)
        assert len(at_work(here)) >= 4
    finally:
        tests.send_signal(signal.SIGKILL)
        tests.wait()
    deadline = time.monotonic() + 15
    while at_work(here) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not at_work(here)


def at_work(folder: str) -> list[int]:
    """Processes whose working directory is `folder`, but this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and os.readlink(entry / "cwd") == folder:
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or is another user's
    return found


def test_the_entry_point_names_the_plug_in() -> None:
    (entry,) = [e for e in importlib.metadata.entry_points(group="pytest11") if e.name == "zerobench"]
    assert entry.value == "zerobench.pytest_plugin" and importlib.util.find_spec(entry.value)
