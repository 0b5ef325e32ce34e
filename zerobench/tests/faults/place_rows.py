"""Faults of the machine: a clock that jumps, fewer cores than ranks, others who want the cores too."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.tests.faults.bench import FAULTY, Bench, done
from zerobench.tests.faults.rank_rows import COMPLETES, completes
from zerobench.tests.faults.row import NotHere, Row, Wrong
from zerobench.tests.faults.verdicts import RUNS, SUITE, kept, read, undisturbed

JUMPING = """\
import itertools, time
jumps, real = itertools.count(), time.time
time.time = lambda: real() + (-1) ** next(jumps) * 86400.0
time.time_ns = lambda: int(time.time() * 1e9)
"""
SLOW_DEADLINE_S = 2.5


def rows() -> list[Row]:
    return [
        Row("the machine", "the clock jumps", "time.time jumps by a day, back and forth, in every process",
            "everything: the undisturbed verdict", _clock),
        Row("the machine", "one core", "four ranks on one core", "everything", _one_core),
        Row("the machine", "a slow rank", "each forward takes 0.6 s: the deadline comes before the end",
            "the record: slow, not hung", _slow, True),
        Row("the machine", "overloaded", "four busy processes a core, and a rank that computes past its deadline",
            "the record: busy, and the load of the machine", _overloaded),
    ]  # fmt: skip


def _clock(bench: Bench) -> str:
    alone = bench.apart("clock")
    (alone.folder / "sitecustomize.py").write_text(JUMPING)
    path = os.pathsep.join((str(alone.folder), *(p for p in sys.path if p)))
    code, out, err = alone.run(*SUITE, "--json", "verdict.json", env={"PYTHONPATH": path})
    if code or read(alone.folder / "verdict.json") != undisturbed(bench):
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    if kept(alone.results()[0], err) != RUNS:
        raise Wrong("case lost", err[-600:])
    return "nothing: deadlines are monotonic, and no file's name depends on the second alone"


def _one_core(bench: Bench) -> str:
    alone = bench.apart("one-core")
    core = min(os.sched_getaffinity(0))
    before = (
        sys.executable,
        "-c",
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])",
    )
    code, out, err = done(alone.start(*SUITE, "--world-size", "4", "-k", "zero2", before=before))
    if code or "pass" not in out:
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    return "nothing"


def _slow(bench: Bench) -> str:
    bench.launch()
    record = bench.launch(deadline_s=SLOW_DEADLINE_S, fault="slow")
    case = Case("faulty", FAULTY, "mlp-tiny", 2, options={"fault": "slow"})
    finding = completes(case, [COMPLETES], {record.id: record})
    if finding.status is Status.INVALID and "the machine gave the ranks no time" in record.reason:
        raise NotHere(f"the machine is too busy: {record.reason}")
    if finding.status is not Status.FAIL:
        raise Wrong("wrong verdict", f"{finding.status}: {record.reason}")
    if not re.search(r"slow: not done within 2.5 s.*slow, not hanging.*--deadline", record.reason):
        raise Wrong("not told", record.reason)
    return record.reason


@contextlib.contextmanager
def _busy(bench: Bench) -> Iterator[None]:
    cores = len(os.sched_getaffinity(0))
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * cores)]
    bench.own |= {hog.pid for hog in hogs}
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _overloaded(bench: Bench) -> str:
    bench.launch()
    with _busy(bench):
        record = bench.launch(deadline_s=30, fault="loop", at="step")
    if "loop_for_ever" not in record.reason or "the machine is overloaded: load" not in record.reason:
        raise Wrong("not told", record.reason)
    if "slow:" in record.reason:
        raise Wrong("not told", f"a loop is no progress: {record.reason}")
    return record.reason
