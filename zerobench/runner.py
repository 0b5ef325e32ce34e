"""From a plan to a verdict: launch every run once, append each record as it comes, judge, print."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from zerobench import accelerators, interrupt
from zerobench.case import Case, Run
from zerobench.finding import Verdict
from zerobench.judge import Excuse, judge, plan
from zerobench.launch.local import LaunchError, Local
from zerobench.launch.nodes import Nodes
from zerobench.launch.simulate import PLACE, Simulate
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.progress import Progress
from zerobench.report.run_markdown import append_summary, run_lines
from zerobench.report.terminal import verdict_lines
from zerobench.report.text import colourful
from zerobench.scenarios import SCENARIOS
from zerobench.shelf import Shelf
from zerobench.store import StoreError, Writer, begun, results_path
from zerobench.tracing import trace_runs


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

    @property
    def simulated(self) -> bool:
        return any(case.simulated for case in self.cases)

    def runs(self) -> dict[str, Run]:
        return plan(self.cases, self.checks)


@dataclass(frozen=True)
class Done:
    verdict: Verdict
    records: Mapping[str, Record]
    path: Path
    interrupted: int = 0  # the exit code of the signal that stopped it


def execute(what: Plan, arguments: Namespace, nodes: Nodes | None = None) -> Done:
    """Run `what`, write records under arguments.results, print the verdict. nodes: where the ranks are born, in a job of
    several processes; else here. Raises Infrastructure, and ValueError for a file that cannot be resumed with this."""
    runs = what.runs()
    records = Shelf()
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
    if what.simulated:
        about = replace(about, backend=PLACE.backend)
    elif nodes is not None:
        about = replace(about, hosts=nodes.hosts)
    path = (
        Path(resumed) if resumed else results_path(Path(arguments.results), what.suite, about.host, datetime.now(UTC))
    )
    try:
        if resumed:
            records.update(_stored(path, what.suite, runs))
        with Writer(path) if resumed else Writer.fresh(path) as writer:
            writer.write(about)
            try:
                interrupted = _launch_all(what, runs, writer, records, about.id, quiet=arguments.quiet, nodes=nodes)
            except (Infrastructure, StoreError) as error:
                raise Infrastructure(f"{error}\n{_kept(writer.path, records, runs)}") from None
    except StoreError as error:
        raise Infrastructure(str(error)) from None
    for problem in writer.problems:
        print(f"note: {problem}", file=sys.stderr)
    verdict = judge(
        what.suite, what.cases, what.checks, records, by=what.judge, excuses=what.excuses, strict=arguments.strict
    )
    told = verdict.without_missing() if interrupted else verdict
    print("\n".join(verdict_lines(told, what.cases, records, colourful(sys.stdout))))
    if interrupted:
        print(f"stopped by {interrupt.name(interrupted)}; {_kept(writer.path, records, runs)}", file=sys.stderr)
    else:
        print(f"results: {writer.path}", file=sys.stderr)
    name = str(writer.path)
    if problem := append_summary(lambda: run_lines(told, what.cases, records, about, name), name):
        print(f"note: {problem}", file=sys.stderr)
    if getattr(arguments, "trace", False) and not interrupted and not what.simulated:
        _trace(what, [runs[id] for id, r in records.items() if r.status == "ok" and id in runs], writer.path)
    return Done(verdict, records, writer.path, interrupted)


def _trace(what: Plan, runs: list[Run], path: Path) -> None:
    """A trace of each plain run, in a folder beside the results."""
    folder = path.with_name(f"{path.stem}-trace")
    plain = [run for run in runs if run.scenario == "plain"]
    try:
        written = trace_runs(plain, folder, deadline_s=what.deadline_s)
    except (LaunchError, OSError) as error:
        raise Infrastructure(f"no traces: {error}") from None
    print(f"traces: {folder} ({written} of {len(plain)} plain runs; open one in ui.perfetto.dev)", file=sys.stderr)


def _stored(path: Path, suite: str, runs: Mapping[str, Run]) -> dict[str, Record]:
    """What `path` has of these runs and need not be done again. Raises StoreError, and ValueError for another suite's."""
    found = begun(path)
    if found is None:
        return {}
    if found.provenance.suite != suite:
        raise ValueError(
            f"--resume {path}: it has results of {found.provenance.suite!r}, not of {suite!r}; name that suite, or leave "
            "out --resume"
        )
    done = found.records.items()
    return {id: r for id, r in done if id in runs and r.run == runs[id] and r.status in ("ok", "skip")}


def _kept(path: Path, records: Mapping[str, Record], runs: Mapping[str, Run]) -> str:
    done = sum(id in records for id in runs)
    return f"{done} of {len(runs)} runs are in {path}; to go on, give the same command with --resume {path}"


def _launcher(what: Plan, nodes: Nodes | None) -> contextlib.AbstractContextManager[Local | Nodes]:
    if what.simulated:
        return Simulate()  # here alone, also in a job: it needs no ranks
    return Local() if nodes is None else contextlib.nullcontext(nodes)  # a job is ended by who began it


def _launch_all(
    what: Plan,
    runs: dict[str, Run],
    writer: Writer,
    records: Shelf,
    provenance: str,
    *,
    quiet: bool,
    nodes: Nodes | None = None,
) -> int:
    """Fill `records`, appending each as it comes; the exit code of the signal that stopped it, or 0."""
    left = [run for id, run in runs.items() if id not in records]
    wanted = {run.checkpoint for run in left if run.saved_at}
    again = [run for run in runs.values() if run not in left and not run.saved_at and run.checkpoint in wanted]
    left = [*again, *left]  # a checkpoint lives as long as the launcher: what loads it needs it saved again
    timed = [run for run in runs.values() if "time" in SCENARIOS[run.scenario].watch and not what.simulated]
    left += timed * (what.launches - 1)  # in rounds, so that what drifts in time touches all runs alike
    progress = Progress(len(left), sys.stderr, quiet=quiet)
    try:
        with interrupt.patient() as asked, _launcher(what, nodes) as local:
            for run in left:
                if asked.code:
                    return asked.code
                progress.begin(run.id)
                record = local.launch(run, deadline_s=what.deadline_s, suite=what.suite)
                record = replace(record, provenance=provenance)
                records.put(record, writer.write(record))
                progress.end(record)
    except LaunchError as error:
        raise Infrastructure(str(error)) from None
    except KeyboardInterrupt as stop:
        return interrupt.exit_code(stop)
    finally:
        progress.finish()
    return asked.code
