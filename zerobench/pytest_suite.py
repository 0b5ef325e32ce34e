"""The collectors and items of a suite: file, case, finding, with the ids that the command line uses.

An item is a pytest.Function, so that fixtures, markers and other people's plug-ins work on it as on any test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from zerobench.baseline import BYTES, TRAFFIC
from zerobench.baseline_file import BaselineError
from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.checks.check import Check
from zerobench.checks.timing import slowest
from zerobench.commands_info import known
from zerobench.finding import Finding, Level, Status
from zerobench.implementations.registry import absolute
from zerobench.loader import BadFile, read
from zerobench.pytest_plugin import SESSION
from zerobench.pytest_session import Bench, baseline_of, counts
from zerobench.report.terminal import finding_lines
from zerobench.report.text import clean
from zerobench.suite import load

TIMED = "time.step"
GRACE_S = 30.0
"""What an item may take under pytest-timeout beyond the deadlines of its runs: the import of torch, and judging."""


class NotAsRequired(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__("\n".join(finding_lines(finding, False)))


class Failed(NotAsRequired):
    """A finding that fails, and which an xfail of the suite may foretell."""


class NoVerdict(NotAsRequired):
    """A finding that says neither: an error, an invalid measurement, no baseline. Nothing excuses it."""


class RankClock:
    """A timer for pytest-benchmark that returns what the ranks measured, never the wall clock."""

    __name__ = "zerobench.rank_clock"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def reset(self) -> None:
        """Back to 0, so that end less start is the sample to the last bit."""
        self.now = 0.0

    def play(self, seconds: float) -> None:
        self.now = seconds


class SuiteFile(pytest.File):
    """A suite. Collecting says all that is wrong with it, each at its line and column, and launches nothing."""

    def collect(self) -> Iterator[CaseNode]:
        name = os.path.relpath(self.path, self.config.invocation_params.dir)
        try:
            suite = load(name if not name.startswith("..") else self.path, known())  # type: ignore[arg-type]
            marks = read(self.path).marks
            cases = tuple(replace(case, reference=absolute(case.reference)) for case in suite.cases())
            baseline = baseline_of(self.config.getoption("--zb-baseline"), suite.suite)
        except (BadFile, BaselineError, ValueError) as error:
            raise self.CollectError(clean(str(error))) from None
        except FileNotFoundError as error:
            raise self.CollectError(
                f"{error.filename}: no such baseline; make it: zerobench accept RESULT --bytes"
            ) from None
        if suite.launch == "torchrun":
            raise self.CollectError(f"{name}: launch: torchrun: pytest launches local and simulated ranks only")
        bench = Bench(self.config.stash[SESSION], suite, cases, baseline)
        lines = {check: marks.get(("checks", i), (1, 1))[0] - 1 for i, check in enumerate(suite.checks)}
        for case in cases:
            yield CaseNode.from_parent(self, name=case.id, bench=bench, members=(case,), lines=lines)
        families: dict[str, list[Case]] = {}
        for case in cases:
            families.setdefault(case.family, []).append(case)
        if any(CHECKS[check].over == "family" for check in suite.checks):
            for family, members in families.items():
                yield CaseNode.from_parent(self, name=family, bench=bench, members=tuple(members), lines=lines)
        for case_id in sorted(set(baseline.cases) - {c.id for c in cases}) if baseline else ():
            yield CaseNode.from_parent(self, name=case_id, bench=bench, members=(), lines=lines)


class CaseNode(pytest.Collector):
    """A case, or a family of them (`n*`), or one that only the baseline has (no members)."""

    def __init__(self, *, bench: Bench, members: tuple[Case, ...], lines: dict[str, int], **kw: Any) -> None:
        super().__init__(**kw)
        self.bench, self.members, self.lines = bench, members, lines

    def collect(self) -> Iterator[FindingItem]:
        bench, members = self.bench, self.members
        alone = members and members[0].id == self.name
        for id in dict.fromkeys([*bench.suite.checks, *(["runtime.completes"] if alone else [])]):
            check = CHECKS[id]
            if members and (check.over == "case") == bool(alone):
                yield self._item(id, check.level, partial(bench.finding, check, members), check)
        if bench.baseline and (alone or not members):
            for id in (BYTES, TRAFFIC):
                yield self._item(id, Level.MUST, partial(bench.compared, self.name, id), None)

    def _item(self, id: str, level: Level, say: Callable[[], Finding], check: Check | None) -> FindingItem:
        manager = self.config.pluginmanager
        timed = id == TIMED and manager.hasplugin("benchmark")
        item: FindingItem = FindingItem.from_parent(
            self, name=id, callobj=judge_step_time if timed else judge_finding, say=say, line=self.lines.get(id, 0)
        )
        item.add_marker(pytest.mark.zerobench(check=id, chapter=id.split(".")[0], level=level.value))
        suite = self.bench.suite
        reason = next((r for case in self.members if (r := suite.xfail_reason(case, id))), None)
        if reason is not None and level is not Level.INFO:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=Failed))
        if timed:
            item.add_marker(pytest.mark.benchmark(group=suite.suite, timer=item.clock))
        if manager.hasplugin("timeout"):
            runs = self.bench.runs(self.members, check)
            item.add_marker(pytest.mark.timeout(GRACE_S + len(runs) * (suite.deadline_s or 60.0)))
        return item


class FindingItem(pytest.Function):
    """One finding. say: gives it, and launches what it needs that was not launched yet."""

    def __init__(self, *, say: Callable[[], Finding], line: int, **kw: Any) -> None:
        self.say, self.suite_line, self.clock = say, line, RankClock()
        super().__init__(**kw)

    def reportinfo(self) -> tuple[os.PathLike[str], int, str]:
        return self.path, self.suite_line, self.nodeid.partition("::")[2]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kw: Any) -> Any:
        if isinstance(excinfo.value, NotAsRequired):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kw)

    def tell(self, finding: Finding) -> None:
        """Keep the finding for JUnit, then pass, skip or fail as it says."""
        body = finding.to_json()
        for key in ("id", "status", "requirement", "expected", "actual", "relation", "claim", "paper", "ranks"):
            self.user_properties.append((key, body[key]))
        counted = counts(finding, self.config.getoption("--zb-strict"))
        if finding.status is Status.SKIP:
            pytest.skip(finding.actual)
        if finding.status in (Status.PASS, Status.XPASS):
            return
        if not counted:
            pytest.xfail(f"{finding.level.value}, not required: {finding.actual}")
        raise (Failed if finding.status in (Status.FAIL, Status.XFAIL) else NoVerdict)(finding)


def judge_finding(request: pytest.FixtureRequest) -> None:
    request.node.tell(request.node.say())


def judge_step_time(request: pytest.FixtureRequest, benchmark: Any) -> None:
    """As `judge_finding`, and the samples, as the ranks measured them, are pytest-benchmark's."""
    item: FindingItem = request.node
    finding, bench, members = item.say(), item.parent.bench, item.parent.members  # type: ignore[union-attr]
    record = bench.records[members[0].run("plain").id]
    if finding.status is Status.PASS:
        samples = iter(times := slowest([sample.times_s for sample in record.samples]))
        benchmark.name = finding.case
        benchmark.extra_info.update(bench.extra_info(record))
        benchmark.pedantic(lambda: item.clock.play(next(samples)), setup=item.clock.reset, rounds=len(times))
    item.tell(finding)
