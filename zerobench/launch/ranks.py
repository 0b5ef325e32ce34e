"""The life of a rank, from the fork to its last byte. Runs in the rank process."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerobench.case import Run
from zerobench.codec import decode
from zerobench.launch import limits
from zerobench.launch.blackbox import BlackBox
from zerobench.rank import UNABLE, CannotJoin, Outcome, RankContext
from zerobench.readings import Place
from zerobench.record import Failure, Sample

ANSWER = struct.Struct("!?Q")  # whether the rank did what it was asked, and how many bytes of JSON follow
LINGER_S = 2.0
STACK_SIGNAL = signal.SIGUSR1  # on it, a rank writes its Python stacks; done in C, so also while the GIL is held
STACK_NBYTES = 16_000
FINISHED = ("ok", "skip", "invalid")


@dataclass(frozen=True)
class Order:
    """What a rank is born with. Plain data: it crosses as JSON.

    address, port: of the rendezvous. interface: the one that gloo listens on, None for the loopback, "" for gloo's own
    choice; GLOO_SOCKET_IFNAME in environ goes before. local_rank, local_world_size: among the ranks of this machine,
    None where all are there. scratch: this run's folder; ranks share `shared` in it. target:
    "module:function" of (Run, RankContext) -> Outcome. place: a `readings.Place`, which a rank is told because it must
    not look for GPUs itself. environ, cwd, path: the launcher's, now (the fork server's may be older). memory_nbytes:
    what it may take beyond what it is born with; None for no limit.
    """

    rank: int
    world_size: int
    run: Mapping[str, Any]
    target: str
    port: int
    deadline_s: float
    scratch: str
    environ: Mapping[str, str]
    cwd: str
    path: tuple[str, ...]
    place: Mapping[str, Any]
    memory_nbytes: int | None = None
    address: str = "127.0.0.1"
    interface: str | None = None
    local_rank: int | None = None
    local_world_size: int | None = None

    @property
    def shared(self) -> Path:
        return Path(self.scratch, "shared")

    @property
    def note(self) -> Path:
        return Path(self.scratch, f"rank{self.rank}.note")

    @property
    def stacks(self) -> Path:
        return Path(self.scratch, f"rank{self.rank}.stacks")

    @property
    def late_stacks(self) -> Path:
        return Path(self.scratch, f"rank{self.rank}.late")


def live(fields: dict[str, Any], channel_fd: int, output_fd: int) -> None:
    """Do the order and answer; ends the process. The rank leads a session, and so a process group, of its own."""
    os.setsid()
    me = os.getpid()
    order = Order(**fields)
    _speak_into(output_fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(channel_fd, False)
    channel = socket.socket(fileno=channel_fd)
    try:
        box = BlackBox(order.note)
        stacks = order.stacks.open("w")  # open for as long as the rank lives
        faulthandler.enable(stacks, all_threads=True)
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        late = order.late_stacks.open("w")
        faulthandler.dump_traceback_later(order.deadline_s, file=late)  # where the subject took the signal for itself
        limits.restrain(order.memory_nbytes)
        _settle(order)
    except OSError as error:  # nothing of the subject's has run: this is the machine's
        outcome = Outcome(UNABLE, Sample(order.rank), reason=f"{error.filename or order.scratch}: {error.strerror}")
    else:
        outcome = _outcome(order, box)
    if os.getpid() != me:
        os._exit(0)  # a child that the subject forked has run on to here: it is not the rank and has no word
    try:
        body = json.dumps(outcome.to_json(), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        outcome = _failed(order.rank, error)
        body = json.dumps(outcome.to_json()).encode()
    try:
        channel.sendall(ANSWER.pack(outcome.status in FINISHED, len(body)) + body)
        # A rank that leaves at once resets connections on which others still read. It leaves when all have answered
        # (the launcher closes the channel), or after a while: those who wait for it in vain then learn that it is gone.
        # One that failed goes at once: nobody is to wait for it.
        if outcome.status in FINISHED:
            select.select([channel], [], [], LINGER_S)
    finally:
        with contextlib.suppress(OSError, ValueError):  # the subject may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _outcome(order: Order, box: BlackBox) -> Outcome:
    try:
        run = Run.from_json(order.run)
        module, _, name = order.target.partition(":")
        work: Callable[[Run, RankContext], Outcome] = getattr(importlib.import_module(module), name)
        outcome = work(run, _context(order, box))
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{order.target} returned {type(outcome).__name__}, not an Outcome")
        return outcome
    except BaseException as error:  # SystemExit too: an implementation that calls sys.exit has failed
        limits.relieve()
        return _failed(order.rank, error)


def _failed(rank: int, error: BaseException) -> Outcome:
    what = f"{type(error).__name__}: {error}"
    own = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
    lines = traceback.format_exception(type(error), error, own or error.__traceback__)
    failure = Failure("raised", what, stack="".join(lines)[-STACK_NBYTES:])
    return Outcome("error", Sample(rank, failure=failure), reason=what)


def _speak_into(output_fd: int) -> None:
    """Standard output and error into `output_fd`, line by line; standard input is empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output_fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _settle(order: Order) -> None:
    """The surroundings of the launcher and torchrun's variables, before any code of the subject's."""
    os.environ.clear()
    os.environ.update(order.environ)
    os.environ.update(torchrun_variables(order))
    interface = ("lo0" if sys.platform == "darwin" else "lo") if order.interface is None else order.interface
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.chdir(order.cwd)
    sys.path[:] = order.path
    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS would come too late: torch has been imported


def torchrun_variables(order: Order) -> dict[str, str]:
    """The six that libraries read, and the two by which init_method="env://" joins this store instead of a new one."""
    return {
        "RANK": str(order.rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": str(order.rank if order.local_rank is None else order.local_rank),
        "LOCAL_WORLD_SIZE": str(order.local_world_size or order.world_size),
        "MASTER_ADDR": order.address,
        "MASTER_PORT": str(order.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _context(order: Order, box: BlackBox) -> RankContext:
    place = decode(Place, order.place)
    # Longer than the run's deadline: the launcher, which sees all ranks, is the first to end a run that hangs.
    timeout = timedelta(seconds=order.deadline_s + 30)

    def join(name: str = "zerobench") -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        bound = torch.device(place.device) if place.backend == "nccl" else None
        try:
            store = TCPStore(order.address, order.port, is_master=False, timeout=timeout)
            dist.init_process_group(
                place.backend,
                store=PrefixStore(name, store),
                rank=order.rank,
                world_size=order.world_size,
                timeout=timeout,
                device_id=bound,
            )
        except (RuntimeError, OSError) as error:
            raise CannotJoin(f"{type(error).__name__}: {error}") from error

    return RankContext(
        rank=order.rank,
        world_size=order.world_size,
        backend=place.backend,
        device=place.device,
        join=join,
        note=box.note,
        entered=box.entered,
        scratch=order.shared,
        control_ports=frozenset({order.port}),
        place=place,
    )
