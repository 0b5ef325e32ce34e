"""The ranks of one run, seen from the launcher: listen to all of them, until all are done or the run is over."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from zerobench.launch import blackbox
from zerobench.launch.autopsy import End
from zerobench.launch.mismatch import disagreement
from zerobench.launch.nursery import LaunchError, Nursery
from zerobench.launch.ranks import ANSWER, LINGER_S, STACK_SIGNAL, Order
from zerobench.launch.vigil import Vigil
from zerobench.rank import Outcome

OUTPUT_NBYTES = 64 * 1024  # kept of what a rank prints, the last
ANSWER_NBYTES = 1 << 30  # the most that a rank may answer
LOOK_S = 0.5  # between looks at whether ranks get on
GRACE_S = 2.0  # for the others to fail or finish by themselves, after the first failure
STACKS_S = 1.0  # for ranks to write their stacks before they are killed
LEAVE_S = 1.0  # for ranks that answered to end
LATE = ("hung", "slow", "starved", "mismatch")
KILL_S = 10.0  # for the kernel to end what it was told to kill


@dataclass
class _Rank:
    order: Order
    pid: int
    channel: socket.socket
    output: int
    heard: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    good: bool | None = None  # what its answer says, once all of it is here
    code: int | None = None
    cut: str = ""  # autopsy.End's
    let_go: bool = False  # the launcher ended it, after it had answered
    note: str | None = None  # its last, when it was given up
    vital: str = ""
    halted: bool = False  # stopped by a signal when it was given up

    @property
    def settled(self) -> bool:
        return self.code is not None or self.good is not None or bool(self.cut)

    @property
    def failed(self) -> bool:
        return self.settled and not self.good

    def listen(self) -> bool:
        """Take what the channel holds; False at its end. A rank may die at any byte, and may write anything."""
        more = _drain(lambda: self.channel.recv(1 << 20), self.heard)
        if self.good is None and len(self.heard) >= ANSWER.size:
            good, nbytes = ANSWER.unpack_from(self.heard)
            if nbytes > ANSWER_NBYTES:
                self.cut = "garbled"
            elif len(self.heard) >= ANSWER.size + nbytes:
                self.good = good
        return more and not self.cut

    def read(self) -> bool:
        """Take what it printed, keeping the last."""
        more = _drain(lambda: os.read(self.output, 1 << 16), self.printed)
        del self.printed[:-OUTPUT_NBYTES]
        return more

    def end(self) -> End:
        outcome, cut = None, self.cut
        if self.good is not None and cut not in LATE:  # an answer after the deadline is none
            try:
                outcome = Outcome.from_json(json.loads(self.heard[ANSWER.size :]))
            except (ValueError, KeyError, TypeError, AttributeError):
                cut = "garbled"
        return End(
            rank=self.order.rank,
            outcome=outcome,
            code=None if self.let_go else self.code,
            cut=cut,
            note=self.note if self.note is not None else blackbox.read(self.order.note),
            stacks=_tail(self.order.stacks) or _tail(self.order.late_stacks),
            output=self.printed.decode("utf-8", "replace"),
            vital=self.vital,
            limit_nbytes=self.order.memory_nbytes,
        )


def _drain(read: Callable[[], bytes], into: bytearray) -> bool:
    """Append what `read` has now, a few MiB at most, so that a flood leaves time for the others; False at the end."""
    for _ in range(16):
        try:
            part = read()
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not part:
            return False
        into += part
    return True


class Others(Protocol):
    """The ranks of the same run that other launchers watch. failed: whether one has, or the run is over for another
    reason; asked every `LOOK_S`. tell: one here has failed. wait: those here have answered; until all others have."""

    def failed(self) -> bool: ...

    def tell(self) -> None: ...

    def wait(self, seconds: float) -> None: ...


class Nobody:
    """No others: all ranks of the run are here."""

    def failed(self) -> bool:
        return False

    def tell(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass


class Crew:
    """A context manager: on leaving it the descriptors are closed. Ranks are ended by `stop`, or with the nursery."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.ranks: list[_Rank] = []
        self.logs: dict[int, list[blackbox.Entry]] = {}  # of each rank, when the watch was over
        self._selector = selectors.DefaultSelector()
        self._stack = ExitStack()
        self._stack.callback(self._selector.close)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, order: Order) -> None:
        """Start one rank."""
        mine, theirs = socket.socketpair()
        self._stack.callback(mine.close)
        output, their_output = os.pipe()
        self._stack.callback(os.close, output)
        try:
            pid = self.nursery.birth(order, (theirs.fileno(), their_output))
        finally:
            theirs.close()
            os.close(their_output)
        mine.setblocking(False)
        os.set_blocking(output, False)
        rank = _Rank(order, pid, mine, output)
        self.ranks.append(rank)
        self._selector.register(mine, selectors.EVENT_READ, rank.listen)
        self._selector.register(output, selectors.EVENT_READ, rank.read)

    def watch(self, deadline_s: float, others: Others | None = None) -> None:
        """Returns when every rank has answered or died, `GRACE_S` after the first failure, or at the deadline; earlier
        where those that are left wait for each other in different collectives, which no time can mend.

        others: the rest of the run. A failure there ends the run here, and a rank here is not let go before theirs have
        answered: they may still read from it."""
        others = others or Nobody()
        self._selector.register(self.nursery, selectors.EVENT_READ)
        vigil = Vigil(deadline_s)
        for rank in self.ranks:
            vigil.add(rank.order.rank, rank.pid, rank.order.note)
        end, kind = time.monotonic() + deadline_s, "hung"
        look_at = time.monotonic() + min(LOOK_S, deadline_s / 4)
        while not all(rank.settled for rank in self.ranks):
            if kind == "hung" and any(rank.failed for rank in self.ranks):
                end, kind = min(end, time.monotonic() + GRACE_S), "stopped"
                others.tell()
            now = time.monotonic()
            if end <= now:
                break
            self._listen(min(end, look_at) - now)
            if look_at <= time.monotonic():
                look_at = time.monotonic() + min(LOOK_S, deadline_s / 4)
                vigil.look()
                if kind == "hung" and vigil.stuck(self._unsettled()) and disagreement(self._logs()):
                    kind = "mismatch"
                    break
                if kind == "hung" and others.failed():
                    end, kind = min(end, time.monotonic() + GRACE_S), "stopped"
        if all(rank.good for rank in self.ranks):
            others.wait(LINGER_S)
        elif any(
            rank.failed for rank in self.ranks
        ):  # not at the deadline, which is theirs too: who hung is for all to say
            others.tell()
        vigil.look()
        for rank in self.ranks:
            if not rank.settled:
                rank.cut = kind if kind != "hung" else vigil.lateness(rank.order.rank)
                rank.vital = vigil.words(rank.order.rank)
                rank.halted = vigil.halted(rank.order.rank)
                rank.note = blackbox.read(rank.order.note)
        self.logs = self._logs()

    def stop(self) -> list[End]:
        """End every rank: those that answered may leave, the others leave their stacks and are killed. None remains."""
        late = [rank for rank in self.ranks if rank.cut]
        self._let_die([rank for rank in late if not rank.halted])
        self._let_die([rank for rank in late if rank.halted])  # last: awake, it would go on, and the others with it
        for rank in self.ranks:
            self._forget(rank.channel)
            rank.channel.close()
        self._until(LEAVE_S, self._over)
        for rank in self.ranks:
            if rank.code is None:
                rank.let_go = True
                self.nursery.signal(rank.pid, signal.SIGKILL)
        self._until(KILL_S, self._over)
        if alive := [rank.pid for rank in self.ranks if rank.code is None]:
            raise LaunchError(f"processes {alive} cannot be killed: they wait in the kernel, for a disk or a device")
        self.nursery.sweep()
        return [rank.end() for rank in self.ranks]

    def _let_die(self, late: list[_Rank]) -> None:
        """Have them write their stacks, then kill them."""
        for rank in late:
            self.nursery.signal(rank.pid, STACK_SIGNAL)
            if rank.halted:
                self.nursery.signal(rank.pid, signal.SIGCONT)
        self._until(STACKS_S, lambda: all(_dumped(rank.order.stacks) or rank.code is not None for rank in late))
        if late:
            self._until(0.05, lambda: False)  # a dump of many threads may be half written
        for rank in late:
            rank.let_go = rank.good is not None
            self.nursery.signal(rank.pid, signal.SIGKILL)

    def _unsettled(self) -> list[int]:
        return [rank.order.rank for rank in self.ranks if not rank.settled]

    def _logs(self) -> dict[int, list[blackbox.Entry]]:
        return {rank.order.rank: blackbox.entries(rank.order.note) for rank in self.ranks}

    def _over(self) -> bool:
        return all(rank.code is not None for rank in self.ranks)

    def _until(self, seconds: float, done: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not done() and (left := end - time.monotonic()) > 0:
            self._listen(min(left, 0.02))

    def _listen(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self.nursery:
                self._bury(self.nursery.deaths(read=True))
            elif not key.data():
                self._forget(key.fileobj)
        self._bury(self.nursery.deaths(read=False))

    def _bury(self, deaths: Sequence[tuple[int, int]]) -> None:
        for pid, code in deaths:
            for rank in self.ranks:
                if rank.pid == pid:
                    rank.code = code
                    if rank.channel.fileno() >= 0:
                        rank.listen()
                    rank.read()

    def _forget(self, fileobj: object) -> None:
        if fileobj in self._selector.get_map():
            self._selector.unregister(fileobj)  # type: ignore[arg-type]


def _tail(stacks: Path) -> str:
    return stacks.read_text(errors="replace")[-OUTPUT_NBYTES:] if stacks.exists() else ""


def _dumped(stacks: Path) -> bool:
    return stacks.exists() and b"most recent call first" in stacks.read_bytes()
