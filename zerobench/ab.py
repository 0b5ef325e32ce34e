"""A/B: two sides launched in turns on this machine, for as long as the sequential rule asks for more pairs.

One launch is one replicate: the median over its bare steps of the slowest rank's seconds. A pair is one launch of each
side, next to each other in time, in alternating order (base head, head base, ...): what drifts from minute to minute
touches both alike, and being second costs neither. Cells take turns as well, pair by pair.

A results file has two provenance lines, base's first, and the records of both sides in the order in which they were
made; each names its side's provenance. So the verdict can be computed again from the file.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from zerobench import interrupt
from zerobench.case import Case, Run
from zerobench.checks.pairs import SIDES, SUITE, cells_of, judge_cells
from zerobench.finding import Finding
from zerobench.record import Provenance, Record
from zerobench.report.progress import Progress
from zerobench.scenarios import SCENARIOS
from zerobench.sequential import MOST_ROUNDS, wanted
from zerobench.store import Results, StoreError, Writer, results_path

Runs = Sequence[tuple[Run, Run]]
Launches = dict[str, list[Record]]


class Launcher(Protocol):
    def launch(self, run: Run, *, deadline_s: float, suite: str = "") -> Record: ...


@dataclass(frozen=True)
class Side:
    launcher: Launcher
    about: Provenance


def measure(runs: Runs, launch: Callable[[str, Run, int], Record], launches: Launches, rounds: int) -> None:
    """Fill `launches`, by side, until the rule asks for no more. launch: of (side, run, launches still foreseen)."""
    while True:
        cells = [cell for cell in cells_of(launches, runs) if cell.failed is None]
        counts = wanted({cell.name: cell.pairs for cell in cells}, rounds)
        short = [cell for cell in cells if len(cell.pairs) < counts[cell.name]]
        if not short:
            return
        left = 2 * sum(counts[cell.name] - len(cell.pairs) for cell in short)
        for cell in short:
            for side in SIDES if len(cell.pairs) % 2 == 0 else reversed(SIDES):
                record = launch(side, cell.base if side == "base" else cell.head, left)
                launches[side].append(record)
                left -= 1
                if record.status != "ok":
                    break


@dataclass(frozen=True)
class Done:
    findings: list[Finding]
    path: Path
    interrupted: int  # the exit code of the signal that stopped it, or 0


def compare(
    runs: Runs,
    sides: Mapping[str, Side],
    *,
    results: Path,
    progress: Progress,
    deadline_s: float,
    rounds: int = MOST_ROUNDS,
) -> Done:
    """Measure and judge, each record on disk as it comes. Raises StoreError, and LaunchError of a launcher."""
    launches: Launches = {side: [] for side in SIDES}
    path = results_path(results, SUITE, sides["base"].about.host, datetime.now(UTC))
    with Writer.fresh(path) as writer, interrupt.patient() as asked:

        def launch(side: str, run: Run, left: int) -> Record:
            if asked.code:
                raise interrupt.Stop(signal.SIGINT)
            progress.total = progress.done + left
            progress.begin(f"{side} {run.id}")
            about = sides[side].about
            record = sides[side].launcher.launch(run, deadline_s=deadline_s, suite=about.suite)
            record = replace(record, provenance=about.id)
            writer.write(record)
            progress.end(record)
            return record

        for side in SIDES:
            writer.write(sides[side].about)
        try:
            measure(runs, launch, launches, rounds)
        except KeyboardInterrupt as stop:
            asked.code = interrupt.exit_code(stop)
        finally:
            progress.finish()
    findings = judge_cells(cells_of(launches, runs), sides["base"].about.backend, rounds)
    return Done(findings, writer.path, asked.code)


def suite_of(side: str) -> str:
    """What a side's records and provenance name as their suite."""
    return f"{SUITE}-{side}"


def cases_json(runs: Runs) -> dict[str, tuple[dict[str, Any], ...]]:
    """The cases of each side, as its provenance keeps them: the i-th of base is compared with the i-th of head."""
    return {side: tuple(pair[i].case.to_json() for pair in runs) for i, side in enumerate(SIDES)}


def is_ab(results: Results) -> bool:
    """Whether a results file is that of a comparison."""
    return results.provenance.suite in {suite_of(side) for side in SIDES}


def judge_stored(results: Results) -> list[Finding]:
    """The findings of a stored comparison, from its records alone. Raises StoreError where a side is missing."""
    abouts = {about.suite: about for about in results.provenances.values()}
    if missing := [side for side in SIDES if suite_of(side) not in abouts]:
        raise StoreError(
            f"{results.path}: nothing says what {missing[0]} was: cut off at its beginning; make the comparison again"
        )
    scenarios = {record.run.scenario for record in results.records.values()}
    cases = [[Case.from_json(dict(case)) for case in abouts[suite_of(side)].cases] for side in SIDES]
    if unknown := sorted(scenarios - SCENARIOS.keys()):
        raise StoreError(
            f"{results.path}: a comparison by {unknown[0]!r}, a scenario that this zerobench does not know"
        )
    if len(cases[0]) != len(cases[1]):
        raise StoreError(
            f"{results.path}: {len(cases[0])} cases of base and {len(cases[1])} of head: not a whole comparison"
        )
    runs = [(base.run(s), head.run(s)) for s in sorted(scenarios) for base, head in zip(*cases, strict=True)]
    launches: Launches = {}
    for side in SIDES:
        id = abouts[suite_of(side)].id
        done = [record for each in results.launches.values() for record in each if record.provenance == id]
        failed = [r for r in results.records.values() if r.status != "ok" and r.provenance == id]
        launches[side] = done + failed
    return judge_cells(cells_of(launches, runs), abouts[suite_of("base")].backend)
