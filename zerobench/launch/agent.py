"""One process of a job: it starts its own fork server, and for each run in which its rank takes part it forks that rank.

Process 0 is also the coordinator (`nodes`). The others do as it orders until it says that this is the end, and print
nothing but what goes wrong with themselves.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerobench import accelerators, interrupt
from zerobench.accelerators import Gpus
from zerobench.case import Run
from zerobench.codec import decode, encode
from zerobench.launch import limits, meeting
from zerobench.launch.autopsy import End
from zerobench.launch.blackbox import Entry
from zerobench.launch.control import Control
from zerobench.launch.job import Job
from zerobench.launch.local import LaunchError, Local
from zerobench.readings import Place

TOKEN = "token"  # the file by which a folder is known to be the same on two nodes
TOKEN_S = 3.0  # for a network file system to show it
WELCOME, END = "welcome", "end"
BROKEN = 3  # the exit code


@dataclass(frozen=True)
class Hello:
    """What the coordinator knows of a process. host: the machine's name. network: apart for two processes that do not
    share a loopback interface. address: as seen from process 0's. gpus: what CUDA shows to it. shared: whether it sees
    the folder for checkpoints."""

    rank: int
    host: str
    network: str
    group: str
    local_rank: int
    address: str
    shared: bool
    gpus: Gpus


@dataclass(frozen=True)
class Assignment:
    """One run, to all processes that take part. places: of its ranks. local: (local rank, local world size) of each.
    peers: addresses of each process, for the way to them. spread: whether they need another interface than the loopback.
    memory: how many ranks share the memory of each rank's machine. shared: the folder for checkpoints; "" for none."""

    number: int
    run: Mapping[str, Any]
    target: str
    deadline_s: float
    address: str
    port: int
    places: tuple[Place, ...]
    local: tuple[tuple[int, int], ...]
    peers: tuple[str, ...]
    spread: bool
    memory: tuple[int, ...]
    shared: str = ""

    @property
    def over(self) -> str:
        """The key that says that all ranks have answered, or that one has failed."""
        return f"{self.number}/over"

    def part(self, rank: int) -> str:
        """The key of what came of one rank."""
        return f"{self.number}/part/{rank}"


class Others:
    """The other processes' ranks of one run, for the crew of this one."""

    def __init__(self, control: Control, order: Assignment) -> None:
        self._control, self._order = control, order

    def failed(self) -> bool:
        """Whether one of them has failed, or the coordinator wants no more of this run, or is no more."""
        if self._control.said(self._order.over):
            return bool(self._control.hear(self._order.over) != "answered")
        if self._control.said(END):
            return True
        watched = range(1, len(self._order.places)) if self._control.job.rank == 0 else (0,)
        return bool(self._control.lost(watched))

    def tell(self) -> None:
        """One here has failed."""
        if not self._control.said(self._order.over):
            self._control.say(self._order.over, "failed")

    def wait(self, seconds: float) -> None:
        """The ranks here have answered; until all others have too, or one has failed."""
        if self._control.count(f"{self._order.number}/answered") == len(self._order.places):
            self._control.say(self._order.over, "answered")
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._control.said(self._order.over, left):
            pass


def hello(control: Control, local: Local, folder: str, token: str) -> Hello:
    """Ready: torch is imported. Returns what was said."""
    job = control.job
    local.ready()
    said = Hello(
        rank=job.rank,
        host=platform.node(),
        network=f"{platform.node()} {_network()}",
        group=f"{platform.node()} {job.group}",
        local_rank=job.local_rank,
        address=meeting.address_towards(job.address),
        shared=_sees(Path(folder, TOKEN), token),
        gpus=Gpus(why=why) if (why := accelerators.hidden()) else accelerators.look(),
    )
    control.say(f"hello/{job.rank}", encode(said))
    return said


def do(control: Control, local: Local, order: Assignment) -> tuple[list[End], dict[int, list[Entry]]]:
    """This process's rank of a run, from birth to death: its end, and its last collectives. Raises LaunchError."""
    job = control.job
    rank = job.rank
    run = Run.from_json(dict(order.run))
    try:
        memory_nbytes = limits.share_nbytes(order.memory[rank])
    except ValueError as error:
        raise LaunchError(str(error)) from None
    local_rank, local_world_size = order.local[rank]
    others = [peer for i, peer in enumerate(order.peers) if i != rank]
    return local.part(
        run,
        {rank: order.places[rank]},
        target=order.target,
        deadline_s=order.deadline_s,
        memory_nbytes=memory_nbytes,
        others=Others(control, order),
        shared=Path(order.shared) if order.shared else None,
        address=order.address,
        port=order.port,
        interface=meeting.interface_towards([*others, job.address]) if order.spread else None,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


def serve(job: Job) -> int:
    """The life of a process that is not process 0. Returns the exit code: 0 where the coordinator said that this is the
    end, whatever the verdict, which is process 0's to bear; 3 where something broke."""
    # Ctrl-C reaches every process of a job; the coordinator decides what it means.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Local() as local:
            local.warm()
            with Control(job) as control:
                try:
                    return _obey(control, local)
                except interrupt.Stop as stop:
                    control.close(f"was stopped by {stop}")
                    raise
                except LaunchError as error:
                    control.close(f"has failed: {error}")
                    raise
    except LaunchError as error:
        print(f"zerobench: process {job.rank} on {platform.node()}: {error}", file=sys.stderr)
        return BROKEN


def _obey(control: Control, local: Local) -> int:
    welcome = _next(control, WELCOME)
    if welcome is None:
        return 0
    hello(control, local, **welcome)
    number = 0
    while (body := _next(control, f"{number}/order")) is not None:
        order = decode(Assignment, body)
        if control.job.rank < len(order.places):
            ends, logs = do(control, local, order)
            control.say(order.part(control.job.rank), part_to_json(ends, logs))
        number += 1
    return 0


def _next(control: Control, key: str) -> Any:
    """What the coordinator says under `key`; None if that is nothing more. Raises LaunchError where it is gone."""
    while True:
        if control.said(END):
            return None
        if control.said(key, 1.0):
            return control.hear(key)
        if gone := control.lost([0]):
            raise LaunchError(f"process 0, which coordinates, {gone[0]}; start the job again")


def part_to_json(ends: Sequence[End], logs: Mapping[int, Sequence[Entry]]) -> Any:
    entries = {str(rank): [asdict(entry) for entry in log] for rank, log in logs.items()}
    return {"ends": [end.to_json() for end in ends], "logs": entries}


def part_from_json(data: Any) -> tuple[list[End], dict[int, list[Entry]]]:
    logs = {int(rank): [decode(Entry, entry) for entry in log] for rank, log in data["logs"].items()}
    return [End.from_json(end) for end in data["ends"]], logs


def _network() -> str:
    """The kernel's name of this process's network namespace: as good as a machine of its own, if it is another."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _sees(path: Path, token: str) -> bool:
    until = time.monotonic() + TOKEN_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
