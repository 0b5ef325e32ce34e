"""The launcher's end of the fork server: starts it, asks it for ranks, hears of their deaths, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zerobench.launch.ranks import Order
from zerobench.launch.server import HEADER

PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "zerobench.worker")
"""torch._dynamo because the first torch.optim optimizer imports it: 1.4 s that each rank would pay."""
START_S = 180.0  # to import torch, on a slow disk
_MAIN = (
    "import json, socket, sys; fd, launcher, path, preload = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from zerobench.launch.server import serve; serve(socket.socket(fileno=fd), launcher, preload)"
)


class LaunchError(RuntimeError):
    """The machinery failed, not a rank: no fork server, no more processes, a process that cannot be killed."""


class Nursery:
    """At most one fork server, started when first needed and again if it died. For one thread at a time."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self.preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._text = b""
        self._deaths: deque[tuple[int, int]] = deque()
        self._alive: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The fork server's process id, while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Returns at once; torch is imported meanwhile (seconds), and the first birth waits for it."""
        if self.pid is not None:
            return
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            facts = json.dumps([theirs.fileno(), os.getpid(), sys.path, self.preload])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, facts],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal is the launcher's to handle
            )
        self._control.settimeout(START_S)

    def birth(self, order: Order, fds: tuple[int, int]) -> int:
        """Fork a rank that gets copies of `fds`, its channel and its output. Returns its pid. Raises LaunchError."""
        self.start()
        self._ask({"do": "fork", "order": asdict(order)}, fds)
        answer = self._hear("born", "failed")
        if "failed" in answer:
            raise LaunchError(f"rank {order.rank} could not be started: {answer['failed']}")
        self._alive.add(answer["born"])
        return int(answer["born"])

    def signal(self, pid: int, number: int) -> None:
        """Signal a rank, if it still runs: SIGKILL to its process group, another signal to it alone."""
        self._ask({"do": "signal", "pid": pid, "signal": int(number)})

    def sweep(self) -> list[int]:
        """Kill processes that ranks left behind outside their groups. Returns their pids."""
        self._ask({"do": "sweep"})
        return list(self._hear("swept")["swept"])

    def fileno(self) -> int:
        """Readable when there may be deaths to hear of."""
        assert self._control is not None
        return self._control.fileno()

    def deaths(self, *, read: bool) -> list[tuple[int, int]]:
        """(pid, code) of ranks that ended since the last call, code as in `subprocess`. read: wait for a message."""
        if read:
            self._receive()
            while message := self._next():
                self._keep(message)
        out = list(self._deaths)
        self._deaths.clear()
        return out

    def close(self) -> None:
        """End the fork server and all ranks. Their processes are gone when this returns."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(
                    socket.SHUT_RDWR
                )  # an end of file even where a fork of the launcher holds a copy
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(6)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)  # its ranks follow it
                self._process.wait()
            if (
                self._process.returncode != 0
            ):  # it could not clean up: the kernel killed its ranks, but not their children
                for pid in self._alive:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
        self._control = self._process = None
        self._text = b""
        self._deaths.clear()
        self._alive.clear()

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        assert self._control is not None
        body = json.dumps(request).encode()
        try:
            socket.send_fds(self._control, [HEADER.pack(len(body))], fds)
            self._control.sendall(body)
        except OSError as error:
            raise self._lost(error) from error

    def _hear(self, *wanted: str) -> dict[str, Any]:
        """The next message with one of these keys; deaths that come before it are kept."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            while message := self._next():
                if any(key in message for key in wanted):
                    return message
                self._keep(message)
            self._receive()
        raise LaunchError(f"the fork server did not answer in {START_S:g} s")

    def _keep(self, message: dict[str, Any]) -> None:
        self._alive.discard(message["died"])
        self._deaths.append((message["died"], message["code"]))

    def _next(self) -> dict[str, Any] | None:
        line, newline, rest = self._text.partition(b"\n")
        if not newline:
            return None
        self._text = rest
        return dict(json.loads(line))

    def _receive(self) -> None:
        assert self._control is not None
        try:
            part = self._control.recv(65536)
        except OSError as error:
            raise self._lost(error) from error
        if not part:
            raise self._lost(None)
        self._text += part

    def _lost(self, error: OSError | None) -> LaunchError:
        code: object = None
        if self._process is not None:
            try:
                code = self._process.wait(1)
            except subprocess.TimeoutExpired:
                code = "still running"
        return LaunchError(
            f"the fork server is gone (exit code {code}); its ranks with it" + (f": {error}" if error else "")
        )
