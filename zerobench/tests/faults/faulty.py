"""A correct stage 2 that does one thing wrong, at one moment, on one rank; which, its options say. Runs in ranks.

--option fault=sigkill --option at=backward --option victim=1
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerobench.implementations.protocol import Job, Unsupported
from zerobench.implementations.reference import Zero2

AT_STEP = 1  # the second: the first shows that all is well
HOSTILE_TEXT = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eplanted"


class Faulty(Zero2):
    name = "faulty"

    def build(self, job: Job) -> Any:
        return Engine(job, super().build(job))


class Engine:
    """Stage 2's engine, with the fault in front of the method that the moment names."""

    def __init__(self, job: Job, inner: Any) -> None:
        self.inner, self.steps = inner, 0
        self.fault, self.at = str(job.options.get("fault", "none")), str(job.options.get("at", "step"))
        self.victim = job.world.rank == int(job.options.get("victim", job.world.size - 1))
        self.strike("build")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def strike(self, moment: str) -> None:
        late = moment in ("build", "save", "close") or self.steps == AT_STEP
        if moment != self.at or not late:
            return
        if self.fault in TOGETHER:
            TOGETHER[self.fault](self.victim)
        elif self.victim:
            ALONE[self.fault]()

    def forward(self, batch: tuple[torch.Tensor, ...], *, last: bool) -> torch.Tensor:
        self.strike("forward")
        if self.fault == "slow":
            time.sleep(0.6)
        return self.inner.forward(batch, last=last)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.strike("backward")
        self.inner.backward(loss, last=last)

    def step(self) -> Any:
        if self.at == "collective":
            work = dist.all_reduce(torch.ones(3), async_op=True)
            self.strike("collective")
            work.wait()
        self.strike("step")
        self.steps += 1
        return self.inner.step()

    def model_states(self) -> Any:
        return self.inner.model_states()

    def full_parameters(self) -> Any:
        return self.inner.full_parameters()

    def full_gradients(self) -> Any:
        return self.inner.full_gradients()

    def full_optimizer_state(self) -> Any:
        return self.inner.full_optimizer_state()

    def save(self, path: Path) -> None:
        self.strike("save")
        self.inner.save(path)

    def load(self, path: Path) -> None:
        self.inner.load(path)

    def close(self) -> None:
        self.strike("close")
        self.inner.close()


def _raise(error: BaseException) -> None:
    raise error


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def loop_for_ever() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    while True:  # PyDLL, unlike CDLL, keeps the GIL; a signal that wakes it does not let another thread in
        ctypes.PyDLL(None).pause()


def swallow() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1)


def take_the_signals() -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda *_: None)


def take_the_signals_and_hang() -> None:
    take_the_signals()
    sleep_for_ever()


def leak_tensors() -> None:
    kept = []
    while True:
        kept.append(torch.ones(1 << 20))


_LEAKED: list[Any] = []


def leak_objects() -> None:
    """Small ones, held by a module: nothing becomes free while the exception travels."""
    while True:
        _LEAKED.append([None] * 100)


def flood() -> None:
    """As many bytes as ZEROBENCH_FAULTS_FLOOD says, to both streams."""
    part = b"flood " * 10_922 + b"\n"
    for _ in range(int(os.environ["ZEROBENCH_FAULTS_FLOOD"]) // len(part) // 2):
        os.write(1, part)
        os.write(2, part)


def print_controls() -> None:
    print(HOSTILE_TEXT, flush=True)
    os.write(2, bytes(range(256)))
    raise RuntimeError(HOSTILE_TEXT)


def fork_children(*, hidden: bool = True) -> None:
    """One in the rank's group, one in a session of its own that ignores SIGTERM, one without an environment, and one
    forked twice."""
    sleep = ["sleep", f"600.{int(os.environ['ZEROBENCH_FAULTS_MARK'], 16)}"]
    subprocess.Popen(sleep)
    subprocess.Popen(["sh", "-c", f"trap '' TERM HUP INT; {' '.join(sleep)}; :"], start_new_session=True)
    if hidden:
        subprocess.Popen(sleep, start_new_session=True, env={})
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            sleep_for_ever()
        os._exit(0)


def let_a_child_go_on() -> None:
    """The rank dies; a child that it forked, in a session of its own, trains on in its place, with its sockets."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    os.setsid()


def change_directory() -> None:
    os.chdir("/")


def change_environment() -> None:
    os.environ.clear()
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"


def change_random_state() -> None:
    random.seed(1)
    torch.manual_seed(1)


def fill_disk() -> None:
    """Whatever room there is, in a file of the folder that the run shares with the launcher's own."""
    with contextlib.suppress(OSError), open(os.path.join(_scratch(), "filling"), "wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()


def _scratch() -> str:
    """Beside the stacks that the launcher has this rank write."""
    links = (
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )
    return os.path.dirname(next(path for path in links if path.endswith(".stacks")))


def leave_threads() -> None:
    threading.Thread(target=sleep_for_ever, daemon=False).start()
    threading.Thread(target=loop_for_ever, daemon=True).start()


def close_descriptors() -> None:
    os.closerange(3, 4096)
    sys.stdout.close()


ALONE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "slow": lambda: None,  # but every forward takes its time, on all ranks
    "raise": lambda: _raise(ZeroDivisionError("planted")),
    "raise-SystemExit": lambda: _raise(SystemExit(0)),
    "raise-KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "raise-Unsupported": lambda: _raise(Unsupported("not today")),
    "exit-0": lambda: os._exit(0),
    "exit-3": lambda: os._exit(3),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep_for_ever,
    "loop": loop_for_ever,
    "GIL": hold_the_gil,
    "swallow": swallow,
    "take-signals": take_the_signals,
    "take-signals-hang": take_the_signals_and_hang,
    "leak-tensors": leak_tensors,
    "leak-objects": leak_objects,
    "flood": flood,
    "controls": print_controls,
    "children": fork_children,
    "children-hang": lambda: (fork_children(hidden=False), sleep_for_ever()),
    "child-goes-on": let_a_child_go_on,
    "chdir": change_directory,
    "environment": change_environment,
    "umask": lambda: os.umask(0o777),
    "torch-defaults": lambda: torch.set_default_dtype(torch.float64),
    "random-state": change_random_state,
    "destroy-group": lambda: dist.destroy_process_group(),
    "fill-disk": fill_disk,
    "threads": leave_threads,
    "close-descriptors": close_descriptors,
}
"""What the victim does; the others do nothing."""


def absent(victim: bool) -> None:
    """The others enter a collective; the victim never does."""
    if victim:
        sleep_for_ever()
    dist.all_reduce(torch.ones(7))


def different_kinds(victim: bool) -> None:
    if victim:
        dist.all_gather_into_tensor(torch.empty(8 * dist.get_world_size()), torch.ones(8))
    else:
        dist.all_reduce(torch.ones(8))


def different_sizes(victim: bool) -> None:
    dist.broadcast(torch.ones(200_000 if victim else 7), src=0 if victim else dist.get_world_size() - 1)


def different_orders(victim: bool) -> None:
    """Two buckets, sent without waiting, the other way round on one rank."""
    small, large = torch.ones(5), torch.ones(1 << 18)
    works = [dist.all_reduce(t, async_op=True) for t in ((large, small) if victim else (small, large))]
    for work in works:
        work.wait()


def one_too_many(victim: bool) -> None:
    """The victim enters a barrier that the others do not know; nothing comes after it."""
    if victim:
        dist.barrier()


def two_groups(victim: bool) -> None:
    """Two groups of the same ranks, on each of which all is in order: nobody may be blamed for it."""
    groups = [dist.new_group(), dist.new_group()]
    works = []
    for group in reversed(groups) if victim else groups:
        size = 3 if group is groups[0] else 7
        works.append(dist.all_reduce(torch.ones(size), group=group, async_op=True))
    for work in works:
        work.wait()
    for group in groups:
        dist.destroy_process_group(group)


TOGETHER: dict[str, Callable[[bool], None]] = {
    "absent": absent,
    "kinds": different_kinds,
    "sizes": different_sizes,
    "orders": different_orders,
    "one-too-many": one_too_many,
    "two-groups": two_groups,
}
"""What all ranks do, the victim otherwise than the rest."""
