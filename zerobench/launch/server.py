"""The fork server: a process with torch imported, that forks ranks on request, and takes them with it when it goes.

It is a loop in one thread, always in `select`, so that it reacts whatever its ranks do. Three ropes hold a rank:
the server kills all process groups when its socket to the launcher closes, however the launcher died; the kernel kills
the ranks when the server dies (`die_with_parent`); and orphans of a rank become the server's children, which it kills.

Why not multiprocessing's: that one is one a process, shared with whatever else the launcher runs; its children keep it
alive after the launcher's death; it runs the launcher's `__main__` again in each child; its environment is frozen.

The talk, over one Unix socket. To the server: a header (`HEADER`) whose message carries the descriptors, then JSON:
{"do": "fork", "order": {...}} or {"do": "signal", "pid": p, "signal": s} or {"do": "sweep"}. From it, a JSON line each:
{"born": pid}, {"failed": why}, {"died": pid, "code": c} (c as subprocess has it: -9 for SIGKILL), {"swept": [pids]}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

from zerobench.implementations import registry
from zerobench.launch import folders, linux, ranks

HEADER = struct.Struct("!I")
CHECK_S = 0.5  # how often it makes sure that the launcher is still its parent
FDS = 2  # that come with a fork: the rank's channel and its output


def serve(control: socket.socket, launcher: int, preload: list[str], folder: str) -> None:
    """Runs until `launcher` is gone or has closed its end. preload: modules that the ranks find imported. folder: the
    launcher's, for what its ranks put into files; removed at the end."""
    linux.adopt_orphans()
    for name in preload:
        if os.getppid() != launcher:
            break
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the rank that needs it imports it again, and reports it as its own
            told = repr(f"{type(error).__name__}: {error}")[1:-1]
            print(
                f"zerobench: {name} could not be imported before the ranks start: {told}", file=sys.stderr, flush=True
            )
    gc.collect()
    gc.freeze()  # no collection in a rank touches, and so copies, what all share
    server = _Server(control, launcher)
    try:
        server.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher has gone
    finally:
        server.end()
        folders.remove(folder)


class _Server:
    def __init__(self, control: socket.socket, launcher: int) -> None:
        self.control, self.launcher = control, launcher
        self.ranks: set[int] = set()
        self.known: set[str] = set()  # references whose module is imported, where it is one of ours
        self.wake_r, self.wake_w = os.pipe()
        os.set_blocking(self.wake_r, False)
        os.set_blocking(self.wake_w, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: it is what makes the wake-up descriptor ring
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self.wake_r, selectors.EVENT_READ)
            while os.getppid() == self.launcher:
                ready = {key.fd for key, _ in selector.select(CHECK_S)}
                if self.wake_r in ready:
                    os.read(self.wake_r, 65536)
                    self.reap()
                if self.control.fileno() in ready and not self.obey(selector):
                    return

    def obey(self, selector: selectors.BaseSelector) -> bool:
        """Carry out one request; False at the end of file."""
        header, fds, _, _ = socket.recv_fds(self.control, HEADER.size, FDS)
        body = b""
        wanted = HEADER.unpack(header)[0] if header else 0
        while len(body) < wanted and (part := self.control.recv(wanted - len(body))):
            body += part
        if not header or len(body) < wanted:
            return False
        request = json.loads(body)
        if request["do"] == "fork":
            self.fork(request["order"], fds, selector)
        elif request["do"] == "signal":
            if request["pid"] in self.ranks:
                self.kill(request["pid"], request["signal"])
        else:
            self.tell(swept=self.sweep())
        return True

    def fork(self, order: dict[str, Any], fds: list[int], selector: selectors.BaseSelector) -> None:
        self.prepare(order)
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(failed=f"fork: {error}")
            return
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                linux.die_with_parent(server)
                selector.close()
                self.control.close()
                os.close(self.wake_r)
                os.close(self.wake_w)
                ranks.live(order, *fds)
            finally:
                os._exit(70)
        self.ranks.add(pid)
        for fd in fds:
            os.close(fd)
        self.tell(born=pid)

    def prepare(self, order: dict[str, Any]) -> None:
        """Import the module of an implementation that is our own, once: each rank would pay for it, a second for FSDP.

        A stranger's is left to its ranks, and so are the libraries that an adapter imports when it is asked: what they
        change in torch is for their own ranks alone.
        """
        with contextlib.suppress(Exception, SystemExit):
            reference = order["run"]["case"]["reference"]
            if reference in self.known:
                return
            self.known.add(reference)
            place = (reference if ":" in reference else registry.find(reference).value).partition(":")[0]
            if place.startswith("zerobench."):
                importlib.import_module(place)
                gc.collect()
                gc.freeze()

    def kill(self, pid: int, number: int) -> None:
        """Signal a rank; SIGKILL goes to its whole process group, the others to the rank alone."""
        try:
            if number == signal.SIGKILL:
                os.kill(pid, number)  # for one that has not yet made its own group
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # no such group; on macOS, only the dead left in it
            pass

    def reap(self) -> None:
        """Report ranks that ended. Their groups are killed before they are reaped: until then the pid is theirs."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self.ranks:
                self.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid in self.ranks:
                self.ranks.discard(pid)
                self.tell(died=pid, code=os.waitstatus_to_exitcode(status))

    def sweep(self) -> list[int]:
        """Kill what ranks left behind outside their groups, and what those leave in turn. Returns the pids."""
        killed = []
        while strays := [pid for pid in linux.children() if pid not in self.ranks]:
            for pid in strays:
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)  # ours and unreaped: the pid cannot be another's
                    os.waitpid(pid, 0)
                    killed.append(pid)
        return killed

    def tell(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        for pid in self.ranks:
            self.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self.ranks and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            self.ranks.discard(pid)
            if pid == 0:
                time.sleep(0.005)
        self.sweep()
