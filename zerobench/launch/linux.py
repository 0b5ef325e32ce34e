"""Three words to the Linux kernel about who dies with whom. Elsewhere they do nothing and return False."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
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


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0) == 0)
