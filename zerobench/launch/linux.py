"""What the Linux kernel is told, and asked, about who dies with whom. Elsewhere it does nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36  # both from linux/prctl.h


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when `parent`, which forked it, dies: also when this one holds the GIL in C.

    "Parent" is the *thread* that forked (prctl(2)), so this suits children of single-threaded processes only.
    """
    if not _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        return False
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    return True


def adopt_orphans() -> bool:
    """Make this process the new parent of descendants whose own parent ended, so that none gets away."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The pids of this (single-threaded) process's children, the dead but unreaped included."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def marked(mark: str) -> list[int]:
    """The pids of other processes of this user that began with `mark` ("NAME=value") in their environment."""
    wanted, out = mark.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                out.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return out


def kill_marked(mark: str) -> None:
    """Kill them, and what they start meanwhile, for as long as a few rounds find any."""
    for _ in range(5):
        pids = marked(mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.02)


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0) == 0)
