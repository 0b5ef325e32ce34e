"""What the suites of one pytest run share: the launcher, and every run's record, each launched when first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from zerobench import baseline
from zerobench.baseline import ByteBaseline
from zerobench.case import Case, Run
from zerobench.checks.check import Check
from zerobench.codec import encode
from zerobench.commands import DEADLINE_S
from zerobench.finding import Finding, Level, Status
from zerobench.judge import judge, judge_case, plan
from zerobench.launch.local import LaunchError, Local
from zerobench.launch.simulate import Simulate
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.suite import Suite


class Session:
    """One fork server for all suites of real ranks, one for all of simulated. `close` ends them and every rank."""

    def __init__(self) -> None:
        self._launchers: dict[str, Local] = {}
        self._broken = ""

    def launch(self, run: Run, suite: Suite) -> Record:
        """Raises LaunchError; once the machinery has failed, at once and for every run."""
        if self._broken:
            raise LaunchError(self._broken)
        if run.case.launch not in self._launchers:
            self._launchers[run.case.launch] = Simulate() if run.case.simulated else Local()
        try:
            return self._launchers[run.case.launch].launch(
                run, deadline_s=suite.deadline_s or DEADLINE_S, suite=suite.suite
            )
        except LaunchError as error:
            self._broken = str(error)
            raise

    def close(self) -> None:
        while self._launchers:
            self._launchers.popitem()[1].close()

    @cached_property
    def about(self) -> dict[str, Any]:
        """Where and with what this run was made, for the files of other tools."""
        body: dict[str, Any] = collect(suite="", suite_digest="").to_json()["provenance"]
        return {k: v for k, v in body.items() if v and k not in ("judge", "cases", "checks", "xfail")}


class Bench:
    """One suite: its cases, its records so far, and its baseline, if it is compared with one."""

    def __init__(self, session: Session, suite: Suite, cases: tuple[Case, ...], baseline: ByteBaseline | None) -> None:
        self.session, self.suite, self.cases, self.baseline = session, suite, cases, baseline
        self.records: dict[str, Record] = {}
        self._excuses = tuple(x.to_json() for x in suite.xfail)

    def runs(self, cases: Iterable[Case], check: Check | None) -> dict[str, Run]:
        """The runs that a check needs of these cases; all of theirs where it speaks of every run, or for None."""
        return plan(cases, self.suite.checks if check is None or not check.scenarios else [check.id])

    def record(self, runs: Mapping[str, Run]) -> None:
        """Launch those of `runs` that were not yet, each once a session."""
        for id, run in runs.items():
            if id not in self.records:
                self.records[id] = self.session.launch(run, self.suite)

    def finding(self, check: Check, members: tuple[Case, ...]) -> Finding:
        """The word of `check` on a case, or on a family of them; launches what it needs. Raises LaunchError."""
        self.record(self.runs(members, check))
        suite, by = self.suite, self.suite.judge
        if check.over == "case":
            return judge_case(suite.suite, members[0], check, self.records, suite.checks, by=by, excuses=self._excuses)
        verdict = judge(suite.suite, members, [check.id], self.records, by=by, excuses=self._excuses)
        return next(f for f in verdict.findings if f.check == check.id)

    def compared(self, case_id: str, check: str) -> Finding:
        """The word of the baseline on a case of the suite, or on one that only the baseline has."""
        assert self.baseline is not None
        case = next((c for c in self.cases if c.id == case_id), None)
        runs = self.runs([case], None) if case else {}
        self.record(runs)
        mine = [self.records[id] for id in runs]
        launches = {r.id: (r,) for r in mine if r.status == "ok"}
        reasons = {r.id: f"{r.status}: {r.reason}" for r in mine if r.status != "ok"}
        return baseline.judge(self.baseline, case_id, tuple(runs) if case else None, launches, reasons, check)

    def extra_info(self, record: Record) -> dict[str, Any]:
        """What stands beside the step times of a run in pytest-benchmark's files; bytes and counts by rank."""
        exact = encode(baseline.Exact.of(record))
        return {
            "id": record.id,
            "case": encode(record.run.case),
            "psi": record.model.psi if record.model else None,
            "bytes": exact["nbytes"],
            "collectives": exact["traffic"],
            "fingerprints": {f"{d.what}, step {d.step}": d.value for d in record.samples[0].digests},
            "rank_times_s": [list(sample.times_s) for sample in record.samples],
            "versions": {
                k: v for k, v in self.session.about.items() if k in ("zerobench", "torch", "python", "backend")
            },
            "suite_digest": self.suite.digest,
        }


def baseline_of(path: str | None, suite: str) -> ByteBaseline | None:
    """The byte baseline in a folder of baselines, or in a file. Raises BaselineError, FileNotFoundError."""
    if path is None:
        return None
    given = Path(path)
    return ByteBaseline.load(given if given.suffix == ".json" else given / "bytes" / f"{suite}.json")


def counts(finding: Finding, strict: bool) -> bool:
    """Whether a finding may fail the run: as Verdict's exit code has it."""
    return finding.status is Status.ERROR or finding.level is Level.MUST or (finding.level is Level.SHOULD and strict)
