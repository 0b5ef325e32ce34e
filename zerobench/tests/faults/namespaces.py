"""Commands in namespaces of their own, where mounts, networks and host names can be broken without harm."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from zerobench.tests.faults.row import NotHere


def inside(flags: list[str], before: str, after: str = ":") -> list[str]:
    """What stands in front of a command: it runs in new namespaces (unshare's `flags`), after one shell line and before
    another. Raises NotHere where this user may not."""
    if not _allowed(tuple(flags)):
        raise NotHere(f"unshare {' '.join(flags)} is not allowed here")
    script = f'{before} || exit 98; "$@"; code=$?; {after}; exit $code'
    return ["unshare", *_as_root(), *flags, "sh", "-c", script, "sh"]


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["--map-root-user"]


@cache
def _allowed(flags: tuple[str, ...]) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", *_as_root(), *flags, "true"]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
