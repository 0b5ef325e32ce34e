"""From a plan to a verdict: launch every run once, append each record as it comes, judge, print."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from zerobench import accelerators
from zerobench.case import Case, Run
from zerobench.finding import Verdict
from zerobench.judge import Excuse, judge, plan
from zerobench.launch.local import LaunchError, Local
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.progress import Progress
from zerobench.report.terminal import verdict_lines
from zerobench.report.text import colourful
from zerobench.scenarios import SCENARIOS
from zerobench.store import StoreError, Writer, read, results_path


class Infrastructure(Exception):
    """Our own machinery, or the machine, failed: nothing about a subject."""


@dataclass(frozen=True)
class Plan:
    """What to run and what to judge, whether a suite says it or a command line."""

    suite: str
    cases: tuple[Case, ...]
    checks: tuple[str, ...]
    judge: str
    excuses: tuple[Excuse, ...]
    digest: str
    deadline_s: float
    launches: int = 1  # of each timed run; the launch is what step times are replicated by

    def runs(self) -> dict[str, Run]:
        return plan(self.cases, self.checks)


@dataclass(frozen=True)
class Done:
    verdict: Verdict
    records: dict[str, Record]
    path: Path
    interrupted: bool = False


def execute(what: Plan, arguments: Namespace) -> Done:
    """Run `what`, write records under arguments.results, print the verdict. Raises Infrastructure."""
    runs = what.runs()
    records: dict[str, Record] = {}
    resumed = getattr(arguments, "resume", None)
    about = collect(
        suite=what.suite,
        suite_digest=what.digest,
        cases=tuple(case.to_json() for case in what.cases),
        checks=what.checks,
        judge=what.judge,
        xfail=what.excuses,
        **(accelerators.provenance() if any(case.device != "cpu" for case in what.cases) else {}),
    )
    path = results_path(Path(arguments.results), what.suite, about.host, datetime.now(UTC))
    try:
        if resumed:
            path = Path(resumed)
            stored = read(path).records
            records = {id: r for id, r in stored.items() if id in runs and r.run == runs[id] and r.status != "error"}
        with Writer(path) as writer:
            writer.write(about)
            interrupted = _launch_all(what, runs, writer, records, about.id, quiet=arguments.quiet)
    except StoreError as error:
        raise Infrastructure(str(error)) from None
    verdict = judge(
        what.suite, what.cases, what.checks, records, by=what.judge, excuses=what.excuses, strict=arguments.strict
    )
    print("\n".join(verdict_lines(verdict, what.cases, records, colourful(sys.stdout))))
    print(f"results: {path}", file=sys.stderr)
    return Done(verdict, records, path, interrupted)


def _launch_all(
    what: Plan, runs: dict[str, Run], writer: Writer, records: dict[str, Record], provenance: str, *, quiet: bool
) -> bool:
    """Fill `records`, appending each as it comes; whether it was interrupted."""
    left = [run for id, run in runs.items() if id not in records]
    wanted = {run.checkpoint for run in left if run.saved_at}
    again = [run for run in runs.values() if run not in left and not run.saved_at and run.checkpoint in wanted]
    left = [*again, *left]  # a checkpoint lives as long as the launcher: what loads it needs it saved again
    timed = [run for run in runs.values() if "time" in SCENARIOS[run.scenario].watch]
    left += timed * (what.launches - 1)  # in rounds, so that what drifts in time touches all runs alike
    progress = Progress(len(left), sys.stderr, quiet=quiet)
    try:
        with Local() as local:
            for run in left:
                progress.begin(run.id)
                record = local.launch(run, deadline_s=what.deadline_s, suite=what.suite)
                record = replace(record, provenance=provenance)
                records[record.id] = record
                writer.write(record)
                progress.end(record)
    except LaunchError as error:
        raise Infrastructure(str(error)) from None
    except KeyboardInterrupt:
        return True
    finally:
        progress.finish()
    return False
