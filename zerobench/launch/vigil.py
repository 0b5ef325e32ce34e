"""Whether ranks get on: told from outside, so that a rank that holds the GIL, or is stopped, is seen as well.

Two witnesses: the black box (how often a rank has noted something, and when last) and the kernel (/proc: whether the
process sleeps, runs or is stopped, and the CPU time that it used). Clocks are monotonic: a clock that is set does not
make a rank late.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from zerobench.launch import blackbox

WINDOW_S = 10.0  # "lately", at most half the deadline
JUST_NOW_S = 1.0
STUCK_S = 3.0  # without a note and without work, before a disagreement ends the run
HALTED = ("T", "t")
IDLE = 0.1  # of a core: less is waiting, not work
STARVED, NEXT_TO_NONE = 0.5, 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Vital:
    """state: the kernel's letter, "" for a process that is gone. cpu_s: used so far, by all its threads. where: the
    kernel function in which it sleeps, if the kernel says so. delay_s: for how long its threads were ready to run and had
    no core, each counted; 0 where the kernel does not say."""

    state: str = ""
    cpu_s: float = 0.0
    where: str = ""
    delay_s: float = 0.0


def vital(pid: int) -> Vital:
    """What the kernel says of a process: proc(5), stat and wchan; schedstat, in Documentation/scheduler/sched-stats.rst,
    whose second figure is nanoseconds on a run queue."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Vital()
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    except OSError:
        where = ""
    delay_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended, a kernel without
            delay_ns += int(task.read_text().split()[1])
    return Vital(fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S, where, delay_ns * 1e-9)


@dataclass
class Watched:
    """One rank under watch."""

    pid: int
    note: Path
    looks: deque[tuple[float, int, float]] = field(default_factory=deque)  # when, notes, CPU seconds
    beat: blackbox.Beat = field(default_factory=blackbox.Beat)
    since_s: float = 0.0  # when this beat was first seen
    then: Vital = field(default_factory=Vital)  # when this beat was first seen
    first: Vital = field(default_factory=Vital)
    born_s: float = 0.0
    vital: Vital = field(default_factory=Vital)

    def look(self, now: float, window_s: float) -> None:
        self.vital, beat = vital(self.pid), blackbox.beat(self.note)
        if not self.looks:
            self.first, self.born_s = self.vital, now
        if beat.notes != self.beat.notes or not self.looks:
            self.beat, self.since_s, self.then = beat, now, self.vital
        self.looks.append((now, beat.notes, self.vital.cpu_s))
        while len(self.looks) > 2 and self.looks[1][0] <= now - window_s:
            self.looks.popleft()

    def idle_for(self, now: float) -> float:
        """Seconds for which it has neither noted anything nor worked; 0 while it does, or is ready to."""
        for_s = now - self.since_s
        cpu_s, delay_s = _spent(self.then, self.vital)
        worked = cpu_s + delay_s > IDLE * for_s
        return 0.0 if worked or self.vital.state == "R" else for_s

    def gets_on(self, now: float, window_s: float) -> bool:
        """Whether it has noted something lately, and again just now: who has stopped doing so is not slow, but stuck."""
        moved = len(self.looks) > 1 and self.looks[-1][1] > self.looks[0][1]
        recent = now - (self.beat.at_s or self.since_s) <= max(JUST_NOW_S, window_s / 4)
        return moved and recent and self.vital.state not in HALTED

    def starved(self, now: float, window_s: float) -> bool:
        """Whether it was the machine that kept it from its deadline: for half the time it was ready, and had no core. A
        rank that gets on is asked about its whole life; one that does not, about the time since its last sign, in which
        it must have had next to no CPU, for else it may well loop."""
        slow = self.gets_on(now, window_s)
        begin, from_s = (self.first, self.born_s) if slow else (self.then, self.since_s)
        cpu_s, delay_s = _spent(begin, self.vital)
        for_s = max(now - from_s, 1e-9)
        return delay_s >= STARVED * for_s and (slow or cpu_s <= NEXT_TO_NONE * for_s)

    def words(self, now: float, window_s: float) -> str:
        """What it was at when it was given up, as far as it shows from outside."""
        if not self.looks:
            return ""
        first, last = self.looks[0], self.looks[-1]
        window, cpu = max(last[0] - first[0], 1e-9), last[2] - first[2]
        quiet = now - (self.beat.at_s or self.since_s)
        if self.vital.state in HALTED:
            return "it was stopped, by SIGSTOP or a debugger"
        if self.gets_on(now, window_s):
            return f"slow, not hanging: {last[1] - first[1]} signs of progress in the last {window:.1f} s"
        tail = f"no sign of progress for {quiet:.1f} s"
        if cpu > IDLE * window:
            return f"busy, with {cpu:.1f} s of CPU in the last {window:.1f} s, but {tail}: a loop, or work that takes longer"
        if self.vital.state == "D":
            return f"it waited for a disk or another device, {tail}"
        if self.vital.state == "R":
            return f"ready to run, but the machine gave it {cpu:.1f} s of CPU in the last {window:.1f} s, {tail}"
        where = f" in {self.vital.where}" if self.vital.where else ""
        return f"asleep{where}, {tail}"


def _spent(before: Vital, now: Vital) -> tuple[float, float]:
    """Seconds of CPU, and seconds without a core though ready, from one look to another."""
    return now.cpu_s - before.cpu_s, now.delay_s - before.delay_s


class Vigil:
    """Watches the ranks of one run; `look` is called every half second or so and is cheap."""

    def __init__(self, deadline_s: float) -> None:
        self.window_s = min(WINDOW_S, deadline_s / 2)
        self.watched: dict[int, Watched] = {}
        self._judged: dict[int, int] = {}

    def add(self, rank: int, pid: int, note: Path) -> None:
        self.watched[rank] = Watched(pid, note)

    def look(self) -> None:
        now = time.monotonic()
        for one in self.watched.values():
            one.look(now, self.window_s)

    def stuck(self, ranks: list[int]) -> bool:
        """Whether these ranks have all done nothing for `STUCK_S`; once for each time that they came to rest."""
        now = time.monotonic()
        if not ranks or any(self.watched[rank].idle_for(now) < STUCK_S for rank in ranks):
            return False
        notes = {rank: self.watched[rank].beat.notes for rank in ranks}
        new, self._judged = notes != self._judged, notes
        return new

    def lateness(self, rank: int) -> str:
        """Why a rank missed its deadline: "hung", "slow" or "starved"."""
        now, one = time.monotonic(), self.watched[rank]
        if one.starved(now, self.window_s):
            return "starved"
        return "slow" if one.gets_on(now, self.window_s) else "hung"

    def halted(self, rank: int) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.watched[rank].vital.state in HALTED

    def words(self, rank: int) -> str:
        return self.watched[rank].words(time.monotonic(), self.window_s)


def overload() -> str:
    """What the machine has to do beyond its cores, in words; "" where it keeps up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return f"the machine is overloaded: load {load:.1f} on {cores} core{'s'[: cores > 1]}" if load > 1.5 * cores else ""
