"""The suite is itself measured: every mutant must be killed by its own checks, and no correct implementation by any.

A survivor, a silent fault that only a crash gave away, and a false alarm are all defects of zerobench, and fail here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from zerobench.case import Case, Run
from zerobench.checks.catalogue import ALWAYS, CHECKS
from zerobench.finding import Finding, Level, Status
from zerobench.judge import Excuse, judge, plan
from zerobench.launch.local import WORKER, LaunchError, Local
from zerobench.mutants.mutant import Mutant
from zerobench.mutants.names import MUTANTS
from zerobench.provenance import collect
from zerobench.record import Provenance, Record
from zerobench.report.progress import Progress
from zerobench.report.terminal import finding_lines
from zerobench.report.text import colourful, table
from zerobench.shelf import Shelf
from zerobench.store import StoreError, Writer, read, results_path
from zerobench.terms import PRECISIONS

CORRECT = {name: name for name in ("ddp", "zero1", "zero2", "zero3", "torch-ddp")} | {
    f"rows{stage}": f"zerobench.mutants.rows:Rows{stage}" for stage in range(4)
}
"""The reference, torch's own, and a second implementation that is built otherwise, so that no check fits one layout
only."""
QUICK = ("zero2", "rows1")
SLOW = ("memory.device", "state.reshard")
"""The correct implementations of `--quick`, and what it leaves out on them."""
KNOWN: tuple[Excuse, ...] = (
    {
        "implementation": "torch-ddp",
        "world_size": 1,
        "check": "traffic.single",
        "reason": "DDP all-reduces at n = 1 too, a collective of one rank for each bucket",
    },
)
"""True findings about implementations that count as correct. One that is no longer found fails as well."""
KILLS = (Status.FAIL, Status.INVALID)
DEADLINE_S = 30.0
HANG_DEADLINE_S = 5.0
PATIENCE_S = 120.0
"""For a correct implementation: rows2 at n = 4 needs 12 s on two idle cores, and a busy machine is no false alarm."""


UNTIMED = "zerobench.worker:untimed"


@dataclass(frozen=True)
class Trial:
    """One implementation that is put through some checks. mutant: None for a correct one."""

    cases: tuple[Case, ...]
    checks: tuple[str, ...]
    mutant: Mutant | None = None

    @property
    def name(self) -> str:
        return self.mutant.name if self.mutant else self.cases[0].implementation

    @property
    def deadline_s(self) -> float:
        if self.mutant is None:
            return PATIENCE_S
        return HANG_DEADLINE_S if "hangs" in self.mutant.name else DEADLINE_S

    @property
    def target(self) -> str:
        """What its ranks do. No mutant is killed by seconds: theirs are not taken, which are a fifth of a run."""
        return UNTIMED if self.mutant else WORKER


def trials(quick: bool) -> list[Trial]:
    """Mutants at their own n and precision; correct implementations at n = 2, and whole: at 1 to 4 in every precision."""
    out = []
    for mutant in MUTANTS.values():
        family = any(CHECKS[k].over == "family" for k in mutant.killers)
        sizes: tuple[int, ...] = (1, 2, 3) if family else (mutant.world_size,)
        cases = tuple(
            Case(mutant.name, mutant.reference, "gpt-tiny", n, mutant.precision, micro_batches=mutant.micro_batches)
            for n in sizes
        )
        out.append(Trial(cases, (*mutant.killers, *mutant.through), mutant))
    for name, reference in CORRECT.items():
        if quick and name not in QUICK:
            continue
        sizes, precisions = ((2,), ("bf16",)) if quick else ((1, 2, 3, 4), PRECISIONS)
        cases = tuple(Case(name, reference, "gpt-tiny", n, p) for p in precisions for n in sizes)
        out.append(Trial(cases, tuple(c for c in CHECKS if not (quick and c in SLOW))))
    return out


def selftest(arguments: Namespace) -> int:
    """Run all trials, print the kill matrix, return 0 where nothing is wrong with zerobench, else 1."""
    quick = arguments.quick
    todo = [t for t in trials(quick) if any(word in t.name for word in arguments.select or [""])]
    if not todo:
        print(
            f"zerobench: no trial named {', '.join(arguments.select)}; zerobench list mutants names them",
            file=sys.stderr,
        )
        return 5
    runs = {id: (run, t.deadline_s, t.target) for t in todo for id, run in plan(t.cases, t.checks).items()}
    about = collect(suite="selftest", suite_digest="", cases=tuple(c.to_json() for t in todo for c in t.cases))
    records = Shelf()
    try:
        if resumed := arguments.resume:
            records.update(_stored(Path(resumed), runs, about))
        path = Path(resumed or results_path(Path(arguments.results), "selftest", about.host, datetime.now(UTC)))
        with Writer(path) if resumed else Writer.fresh(path) as writer:
            writer.write(about)
            _launch(runs, records, writer, about.id)
    except (LaunchError, StoreError) as error:
        print(f"zerobench: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"{len(records)} of {len(runs)} runs are in {path}: --resume {path} goes on", file=sys.stderr)
        raise
    return report(todo, records, left_out(quick, arguments.select), arguments.markdown)


def _launch(runs: Mapping[str, tuple[Run, float, str]], records: Shelf, writer: Writer, provenance: str) -> None:
    """Fill `records` with what they lack, appending each as it comes."""
    left = [id for id in runs if id not in records]
    saved = {runs[id][0].checkpoint for id in left} - {None}
    again = [id for id in records if runs[id][0].checkpoint in saved and not runs[id][0].saved_at]
    progress = Progress(len(again) + len(left), sys.stderr)
    try:
        with Local() as local:
            for id in (*again, *left):  # a checkpoint lives as long as the launcher
                run, deadline_s, target = runs[id]
                progress.begin(id)
                record = local.launch(run, deadline_s=deadline_s, suite="selftest", target=target)
                record = replace(record, provenance=provenance)
                records.put(record, writer.write(record))
                progress.end(record)
    finally:
        progress.finish()


def _stored(path: Path, runs: Mapping[str, tuple[Run, float, str]], about: Provenance) -> dict[str, Record]:
    """What an interrupted self-test has of these runs. Raises StoreError for what is none, or one of other code."""
    found = read(path)
    if found.provenance.suite != "selftest":
        raise StoreError(
            f"{path}: results of {found.provenance.suite!r}, not of a self-test; name one of those, or leave out --resume"
        )
    if found.provenance.commit != about.commit:
        raise StoreError(
            f"{path}: made by commit {found.provenance.commit}, this is {about.commit}: a self-test speaks of one"
        )
    return {id: r for id, r in found.records.items() if id in runs and r.run == runs[id][0]}


def report(todo: Sequence[Trial], records: Mapping[str, Record], without: str = "", markdown: str | None = None) -> int:
    """The kill matrix and what is wrong with it, on stdout; the exit code. without: what was left out, in words."""
    colour = colourful(sys.stdout)
    rows = [("mutant", "killed by", "not killed by", "verdict")]
    wrong = 0
    details: list[str] = []
    for trial in todo:
        excuses = () if trial.mutant else KNOWN
        verdict = judge("selftest", trial.cases, trial.checks, records, by="claim", excuses=excuses)
        if trial.mutant is None:
            bad = [f for f in verdict.findings if f.status not in (Status.PASS, Status.SKIP, Status.XFAIL)]
            wrong += len(bad)
            for finding in bad:
                details += ["", f"false alarm on {trial.cases[0].implementation}:", *finding_lines(finding, colour)]
            passed = sum(f.status is Status.PASS for f in verdict.findings)
            rows.append(
                (f"({trial.cases[0].implementation}, correct)", "", "", f"{passed} pass, {len(bad)} false alarms")
            )
            continue
        row, problem = kill_row(trial.mutant, verdict.findings)
        rows.append(row)
        if problem:
            wrong += 1
            details += ["", f"{trial.mutant.name}: {problem}"]
            for finding in verdict.findings:
                details += finding_lines(finding, colour)
    print("\n".join([*table(rows), *details, ""]))
    mutants = sum(t.mutant is not None for t in todo)
    total = (
        f"{mutants} mutants, {len(todo) - mutants} correct implementations, {wrong} defects of zerobench "
        f"({without or 'nothing was left out'})"
    )
    print(total)
    if markdown:
        text = kill_matrix(rows[1:], total)
        Path(markdown).write_text(text, encoding="utf-8")
    return 1 if wrong else 0


def left_out(quick: bool, select: Sequence[str] | None) -> str:
    """What `--quick` and `-k` left out, in words."""
    words = [f"only -k {' '.join(select)}"] if select else []
    if quick:
        words.append(f"quick: of correct ones only {', '.join(QUICK)}, at n = 2 in bf16, without {', '.join(SLOW)}")
    return "; ".join(words)


def kill_matrix(rows: Sequence[tuple[str, str, str, str]], total: str) -> str:
    """The matrix as Markdown, with what each mutant stands for."""
    lines = [
        "# Kill matrix",
        "",
        f"torch {version('torch')}, gloo on the CPU, model gpt-tiny. {total}.",
        "Made by `zerobench selftest --markdown FILE`; never edited by hand.",
        "",
        "| mutant | fault | stands for | killed by | verdict |",
        "|---|---|---|---|---|",
    ]
    for name, killed, _, verdict in rows:
        mutant = MUTANTS.get(name)
        fault, report = (mutant.fault, mutant.stands_for) if mutant else ("none", "")
        lines.append(f"| {name} | {fault} | {report} | {killed} | {verdict} |")
    return "\n".join([*lines, ""])


def kill_row(mutant: Mutant, findings: Sequence[Finding]) -> tuple[tuple[str, str, str, str], str]:
    """A line of the kill matrix, and what is wrong with it, if anything."""
    killed = sorted({f.check for f in findings if f.status in KILLS and f.level is not Level.INFO})
    survived = [check for check in mutant.killers if check not in killed]
    problem = ""
    if survived:
        problem = f"survives {', '.join(survived)}"
    elif not mutant.loud and ALWAYS in killed:
        problem = "crashed, though its fault is a silent one"
    return (mutant.name, ", ".join(killed), ", ".join(survived), "survives" if problem else "killed"), problem
