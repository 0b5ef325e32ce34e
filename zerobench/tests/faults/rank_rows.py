"""Faults of a rank: what one does while the other trains on. All but the last group must fail `runtime.completes`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from zerobench.case import Case
from zerobench.finding import Finding, Status
from zerobench.judge import judge, plan
from zerobench.record import Record
from zerobench.report.terminal import finding_lines
from zerobench.tests.faults.bench import FAULTY, Bench
from zerobench.tests.faults.row import NotHere, Row, Wrong

MOMENTS = ("build", "forward", "backward", "collective", "step", "save", "close")
DEADLINE_S = 60.0
HANG_S = 4.0
MORE_S = 5.0  # after the deadline
COMPLETES = "runtime.completes"


@dataclass(frozen=True)
class Fault:
    """kind, says: of the victim's failure, says as a regular expression; kind "" where the run is to complete, and says
    is then what the finding tells. ends: it hangs, and the deadline ends it. quick: the moment that the short part tries.
    """

    name: str
    done: str
    kind: str
    says: str
    ends: bool = False
    quick: str = ""
    moments: tuple[str, ...] = MOMENTS
    fails: bool = True
    deadline_s: float = 0.0  # 0: HANG_S where it hangs, else DEADLINE_S


FAULTS = (
    Fault("raise", "raises", "raised", "ZeroDivisionError: planted", quick="backward"),
    Fault("raise-SystemExit", "raises SystemExit(0)", "raised", "SystemExit: 0", moments=("build", "step", "close")),
    Fault("raise-KeyboardInterrupt", "raises KeyboardInterrupt", "raised", "KeyboardInterrupt", moments=("step",)),
    Fault(
        "raise-Unsupported",
        "says in mid-run that it supports nothing",
        "raised",
        "Unsupported",
        quick="step",
        moments=("forward", "step", "save", "close"),
    ),
    Fault("exit-0", "os._exit(0)", "died", "exited with code 0 before it answered", quick="close"),
    Fault("exit-3", "os._exit(3)", "died", "exited with code 3 before it answered"),
    Fault("exec", "replaces itself by /bin/true", "died", "exited with code 0 before it answered", moments=("step",)),
    Fault("SIGKILL", "is killed by SIGKILL", "died", "killed by SIGKILL", quick="collective"),
    Fault("SIGSEGV", "reads address 0", "died", "killed by SIGSEGV"),
    Fault("sleep", "sleeps for ever", "hung", "in sleep_for_ever .*asleep", ends=True, quick="save"),
    Fault("loop", "loops for ever", "hung", "in loop_for_ever .*busy, with", ends=True, moments=("forward", "step")),
    Fault("GIL", "waits in C with the GIL held", "hung", "in hold_the_gil .*asleep", ends=True, quick="build"),
    Fault("SIGSTOP", "is stopped by SIGSTOP", "hung", "it was stopped, by SIGSTOP", ends=True, quick="backward"),
    Fault("swallow", "hangs, and swallows every exception", "hung", "in swallow", ends=True, moments=("step",)),
    Fault(
        "absent",
        "does not enter a collective of the others",
        "hung",
        "in sleep_for_ever",
        ends=True,
        moments=("forward", "step"),
        quick="step",
    ),
    Fault(
        "take-signals-hang",
        "takes every signal, and hangs",
        "hung",
        "asleep",
        ends=True,
        moments=("step",),
    ),
    Fault(
        "kinds",
        "enters an all-gather where the others enter an all-reduce",
        "mismatch",
        "disagree on the kind of collective",
        quick="step",
        moments=("forward", "step", "save"),
    ),
    Fault(
        "sizes",
        "broadcasts another size from another root",
        "mismatch",
        "disagree on the size of collective",
        moments=("forward", "step"),
    ),
    Fault(
        "orders",
        "sends its two buckets the other way round",
        "mismatch",
        "disagree on the order of collective",
        quick="step",
        moments=("forward", "step"),
    ),
    Fault(
        "one-too-many",
        "enters a barrier that the others do not know, and nothing follows",
        "",
        "rank 1",
        moments=("close",),
        deadline_s=15.0,
    ),
    Fault(
        "leak-tensors",
        "keeps tensors until there is no memory",
        "raised",
        "ran out of its 700 MB",
        quick="forward",
        moments=("build", "forward", "step", "close"),
    ),
    Fault(
        "leak-objects",
        "keeps small objects until there is no memory",
        "raised",
        "ran out of its 700 MB",
        moments=("forward", "step"),
    ),
    Fault(
        "destroy-group",
        "destroys the process group",
        "raised",
        "process group",
        moments=("build", "forward", "step"),
    ),
    Fault("close-descriptors", "closes every descriptor", "died", "before it answered", moments=("close",)),
    Fault(
        "child-goes-on",
        "is killed; a child that it forked trains on in its place",
        "died",
        r"^killed by SIGKILL \(out of memory\?\)$",
        moments=("forward", "close"),
        quick="close",
    ),
    Fault(
        "controls",
        "prints control characters and raises an error made of them",
        "raised",
        "planted",
        quick="step",
        moments=("build", "step"),
    ),
)
"""Runs that do not finish."""

CHANGES = (
    Fault("chdir", "changes the directory", "", "left changed: .*working directory", quick="step"),
    Fault("umask", "sets the umask to 777", "", "left changed: .*umask", moments=("build", "step")),
    Fault("take-signals", "takes every signal", "", "left changed: .*signal handlers", moments=("build", "step")),
    Fault(
        "torch-defaults", "sets torch's default dtype", "", "left changed: .*torch default dtype", moments=("close",)
    ),
    Fault(
        "destroy-group",
        "destroys the process group last",
        "",
        "left changed: .*default process group",
        moments=("close",),
    ),
)
"""Runs that finish, and leave the house otherwise than it was."""

HARMLESS = (
    Fault(
        "flood",
        "writes 64 MB to its standard streams (1 GB in the full matrix)",
        "",
        "",
        quick="step",
        fails=False,
        moments=("build", "step"),
    ),
    Fault(
        "children",
        "forks children that outlive it: in its group, in sessions of their own, forked twice, without an environment",
        "",
        "",
        quick="step",
        fails=False,
        moments=("build", "step", "close"),
    ),
    Fault(
        "two-groups",
        "uses two groups of the same ranks the other way round",
        "",
        "",
        fails=False,
        moments=("build", "step"),
    ),
    Fault("environment", "empties its environment", "", "", fails=False, moments=("step",)),
    Fault("random-state", "seeds random and torch", "", "", fails=False, moments=("step",)),
    Fault(
        "threads",
        "leaves a thread that loops and one that is no daemon",
        "",
        "",
        quick="step",
        fails=False,
        moments=("build", "close"),
    ),
)
"""Runs that finish, and pass: what the next one finds must be as before."""


def rows() -> list[Row]:
    return [
        _row(fault, moment)
        for fault in (*FAULTS, *CHANGES, *HARMLESS)
        for moment in fault.moments
        if not (moment == "close" and fault.name == "absent")
    ]


def _row(fault: Fault, moment: str) -> Row:
    return Row(
        "a rank",
        f"{fault.name}, {moment}",
        f"rank 1 of 2, in {moment}: {fault.done}",
        "the record, with the failure of each rank" if fault.fails else "the record, complete",
        lambda bench: _try(bench, fault, moment),
        quick=moment == fault.quick,
    )


def _try(bench: Bench, fault: Fault, moment: str) -> str:
    options = {"fault": fault.name, "at": moment}
    case = Case("faulty", FAULTY, "mlp-tiny", 2, options=options)
    checks = ["state.resume"] if moment == "save" else [COMPLETES]
    deadline_s = fault.deadline_s or DEADLINE_S
    if bench.local.server_pid is None:
        bench.launch()  # a deadline is not to begin while torch is imported
    if fault.ends:
        deadline_s = max(HANG_S, 3 * bench.launch().wall_s)  # so that the fault is reached, here and now
    records: dict[str, Record] = {}
    late_s = -deadline_s
    for id, run in plan([case], checks).items():
        began = time.monotonic()
        records[id] = bench.local.launch(run, deadline_s=deadline_s, suite="faults")
        late_s = max(late_s, time.monotonic() - began - deadline_s)
    finding = completes(case, checks, records)
    told = " ".join(finding.actual.split())
    if finding.status is Status.INVALID and "the machine gave the ranks no time" in told:
        raise NotHere(f"the machine is too busy: {told}")
    if finding.status is not (Status.FAIL if fault.fails else Status.PASS):
        raise Wrong("wrong verdict", f"{finding.status.value}: {told}")
    if late_s > MORE_S:
        raise Wrong("not told", f"{late_s:.1f} s after the deadline: {told}")
    if fault.kind == "mismatch" and late_s > -deadline_s / 2:
        raise Wrong("not told", f"{-late_s:.1f} s before the deadline: {told}")
    first = next(iter(records.values()))
    if fault.kind:
        _failures(first, fault, moment)
    elif not re.search(fault.says, told):
        raise Wrong("not told", told)
    if any("\x1b" in line or "\x9b" in line for line in finding_lines(finding, False)):
        raise Wrong("not told", "control characters reach the terminal")
    again = Case("faulty", FAULTY, "mlp-tiny", 2)
    after = completes(again, [COMPLETES], {(r := bench.launch()).id: r})
    if after.status is not Status.PASS:
        raise Wrong("wrong verdict", f"the next run: {after.actual}")
    return f"{finding.status.value}: {told}"


def completes(case: Case, checks: list[str], records: Mapping[str, Record]) -> Finding:
    if missing := set(plan([case], checks)) - set(records):
        raise Wrong("case lost", ", ".join(missing))
    return next(f for f in judge("faults", [case], checks, records, by="claim").findings if f.check == COMPLETES)


def _failures(record: Record, fault: Fault, moment: str) -> None:
    """The victim's failure is the one that is told, and the other rank's is a consequence, with its last collective. In
    `close` the other has nothing to wait for."""
    other, victim = (sample.failure for sample in record.samples)
    if victim is None or victim.kind != fault.kind or not re.search(fault.says, victim.what, re.DOTALL):
        raise Wrong("not told", f"rank 1: {victim}")
    if other is not None and other.kind not in ("waiting", "stopped", "mismatch"):
        raise Wrong("not told", f"rank 0 is blamed: {other}")
    if fault.ends and moment != "close" and (other is None or "File" not in other.stack or not other.last_call):
        raise Wrong("not told", f"rank 0: its stack or its last collective is missing: {other}")
