"""A long run: the last cases must cost what the first did, in memory, in descriptors and in time."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from zerobench.store import read
from zerobench.tests.faults.bench import Bench, done
from zerobench.tests.faults.row import Row, Wrong

CASES = 1000
SETTLED = 200
"""Cases after which nothing has a reason to grow: more than the records that stay objects."""
GROWTH_NBYTES = 20_000
"""A case and process: a packed record and its findings, which the verdict needs, are some 10 KB."""
SLOWER = 1.3
"""In processor seconds, of some 250 cases: the machine does other things as well, and wall time is theirs too."""
EVERY_S = 0.25


@dataclass(frozen=True)
class Sample:
    """What `zerobench run` and its fork server hold when so many cases are done, and what they and all ranks have used."""

    cases: int
    nbytes: int
    server_nbytes: int
    descriptors: int
    cpu_s: float


def rows() -> list[Row]:
    return [
        Row(
            "the machine",
            f"a soak of {CASES:,} cases",
            f"{CASES:,} equal cases in one run",
            "every case; memory, descriptors and time a case as at the beginning",
            _soak,
            times=CASES,
        )
    ]


def _soak(bench: Bench) -> str:
    alone = bench.apart("soak")
    process = alone.start_code(["-m", "zerobench.tests.faults.soak", str(CASES), "results"])
    samples = []
    while process.poll() is None:
        with contextlib.suppress(OSError, LookupError, StopIteration):
            samples.append(_look(process.pid, alone))
        time.sleep(EVERY_S)
    code, out, err = done(process)
    if code:
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-600:]}")
    records = list(read(alone.results()[0]).records.values())
    if len(records) != CASES or any(record.status != "ok" for record in records):
        raise Wrong("case lost", f"{len(records)} of {CASES} cases")
    late = [s for s in samples if s.cases >= SETTLED]
    if len(late) < 20:
        raise Wrong("not told", f"only {len(late)} looks at it")
    figures = []
    for name, values in (
        ("it", [(s.cases, s.nbytes) for s in late]),
        ("its fork server", [(s.cases, s.server_nbytes) for s in late]),
    ):
        slope = _slope(values)
        if slope > GROWTH_NBYTES:
            raise Wrong("not told", f"{name} grows by {slope:,.0f} bytes a case")
        figures.append(f"{name} {values[-1][1] / 1e6:.0f} MB, {slope / 1e3:+.1f} KB a case")
    third = len(late) // 3
    first, last = ({s.descriptors for s in part} for part in (late[:third], late[-third:]))
    if max(last) > max(first):
        raise Wrong("not told", f"descriptors grow from {max(first)} to {max(last)}")
    ratio = _cost(late[-third:]) / _cost(late[:third])
    if ratio > SLOWER:
        raise Wrong("not told", f"the last third takes {ratio:.2f} times as much processor time a case as the first")
    return (
        f"pass: {', '.join(figures)}; {max(last)} descriptors; {_cost(late):.2f} s of processor a case, "
        f"last third to first {ratio:.2f}; {statistics.median(record.wall_s for record in records):.2f} s of wall time"
    )


def _look(pid: int, bench: Bench) -> Sample:
    server = next(child for child in _children(pid))
    with open(bench.results()[0], "rb") as file:
        cases = sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b"")) - 1
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(cases, _resident(pid), _resident(server), descriptors, _cpu_s(pid) + _cpu_s(server))


def _cpu_s(pid: int) -> float:
    """Of this process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _cost(samples: list[Sample]) -> float:
    """Processor seconds a case."""
    first, last = samples[0], samples[-1]
    return (last.cpu_s - first.cpu_s) / max(1, last.cases - first.cases)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident(pid: int) -> int:
    """Bytes of this process alone: a fork server shares much with its ranks, which come and go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _slope(points: list[tuple[int, int]]) -> float:
    """Theil and Sen's, a case: the median over pairs that are far apart."""
    half = len(points) // 2
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(points[:half], points[half:], strict=False) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0
