"""The launcher's end of the fork server: starts it, asks it for ranks, hears of their deaths, ends it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerobench.launch import folders, linux
from zerobench.launch.ranks import Order
from zerobench.launch.server import HEADER

_OWN = ("implementations.reference", *(f"models.{name}" for name in ("dyadic", "edges", "gpt", "mlp", "stack")))
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "zerobench.worker", *(f"zerobench.{name}" for name in _OWN))
"""torch._dynamo because the first torch.optim optimizer imports it: 1.4 s that each rank would pay. The suite's own
models and reference because each rank would pay 40 ms for them."""
ASKED = "ZEROBENCH_PRELOAD"
"""In the environment: more modules, separated by commas, for libraries whose import each rank would pay."""
END_S = 10.0  # for the server to end its ranks; longer while it still imports torch
START_S = 180.0  # to import torch, on a slow disk
_MAIN = (
    "import json, socket, sys; fd, launcher, path, preload, folder = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from zerobench.launch.server import serve; serve(socket.socket(fileno=fd), launcher, preload, folder)"
)
MARK = "ZEROBENCH_NURSERY"  # in the environment of the fork server, and so of its ranks and of what they start


class LaunchError(RuntimeError):
    """The machinery failed, not a rank: no fork server, no more processes, a process that cannot be killed."""


def _asked() -> list[str]:
    """The modules of `ASKED`. Raises LaunchError for one whose package is not there: no rank would ever say so."""
    asked = [name.strip() for name in os.environ.get(ASKED, "").split(",") if name.strip()]
    for name in asked:
        if name.startswith(".") or importlib.util.find_spec(name.partition(".")[0]) is None:
            raise LaunchError(f"{ASKED} names {name!r}, which is not installed; unset it, or install what it names")
    return asked


class Nursery:
    """At most one fork server, started when first needed and again if it died. For one thread at a time."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self.preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._text = b""
        self._deaths: deque[tuple[int, int]] = deque()
        self._folder: Path | None = None
        self._gave_birth = False  # this server, so that torch is imported and an answer comes at once

    @property
    def folder(self) -> Path:
        """Where the files of its ranks lie; it goes with the fork server, however this process ends."""
        assert self._folder is not None
        return self._folder

    @property
    def pid(self) -> int | None:
        """The fork server's process id, while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Returns at once; torch is imported meanwhile (seconds), and the first birth waits for it."""
        if self.pid is not None:
            return
        self._end()
        preload = [*self.preload, *_asked()]
        self._control, theirs = socket.socketpair()
        # Kept where a server has died: checkpoints lie in it.
        self._folder = self._folder or Path(tempfile.gettempdir(), f"zerobench-{uuid.uuid4().hex[:16]}")
        with theirs:
            facts = json.dumps([theirs.fileno(), os.getpid(), sys.path, preload, str(self._folder)])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, facts],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal is the launcher's to handle
                env=os.environ | self.mark,
            )
        self._control.settimeout(START_S)
        try:
            self._folder.mkdir(
                mode=0o700, exist_ok=True
            )  # after the server is there, which removes it if this process is killed
        except OSError as error:
            raise LaunchError(f"{self._folder}: {error.strerror}; TMPDIR names another place") from error

    def ensure(self) -> None:
        """As `start`; a server that has been killed since the last birth is replaced, though its death may be news."""
        if self.pid is not None and self._gave_birth:
            try:
                self.sweep()
                return
            except LaunchError:
                self._end()
        self.start()

    @property
    def mark(self) -> dict[str, str]:
        """The variable by which processes of this nursery are known, whatever became of their parents."""
        return {MARK: self.folder.name}

    def birth(self, order: Order, fds: tuple[int, int]) -> int:
        """Fork a rank that gets copies of `fds`, its channel and its output. Returns its pid. Raises LaunchError; also
        where the server, once started, has died: the ranks that it had are dead too."""
        body = asdict(order)
        body["environ"] = {**body["environ"], **self.mark}
        self._ask({"do": "fork", "order": body}, fds)
        answer = self._hear("born", "failed")
        if "failed" in answer:
            raise LaunchError(f"rank {order.rank} could not be started: {answer['failed']}")
        self._gave_birth = True
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
        """End the fork server and all ranks. Their processes and files are gone when this returns."""
        self._end()
        if self._folder is not None:
            folders.remove(self._folder)
            self._folder = None

    def _end(self) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(
                    socket.SHUT_RDWR
                )  # an end of file even where a fork of the launcher holds a copy
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)  # its ranks follow it
                self._process.wait()
            if self._process.returncode != 0:  # it could not clean up: the kernel killed its ranks, not their children
                linux.kill_marked(f"{MARK}={self.folder.name}")
        self._control = self._process = None
        self._gave_birth = False
        self._text = b""
        self._deaths.clear()

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
            f"the fork server is gone (exit code {code}), and its ranks with it"
            + (f": {error}" if error else "")
            + "; something killed it (the kernel, for want of memory? see dmesg); what is stored stays, --resume goes on"
        )
