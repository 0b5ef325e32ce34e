"""How much memory a rank may take, so that one that leaks ends itself and not the machine.

The limit is RLIMIT_DATA: private writable memory, which is what torch's CPU allocator and Python's heap are made of
(getrlimit(2), Linux 4.7). Not RLIMIT_AS: libraries reserve address space that they never touch. Not counted are shared
mappings, and each child of a rank has a limit of its own. Where the kernel itself runs short it takes ranks first.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from zerobench.units import nbytes_text, parse_nbytes

VARIABLE = "ZEROBENCH_RANK_MEMORY"
SHARE = 0.8  # of what the machine has to spare, for all ranks of a run together
LEAST_NBYTES = 1 << 30  # a rank with its threads' stacks and torch's own buffers needs some of it

_REFUSED = re.compile(r"MemoryError|bad_?alloc|can(?:'t|not) allocate memory|enforce fail a(?:t alloc|$)", re.I)
"""torch's own message ("[enforce fail at alloc_cpu.cpp:127] ...") may be cut off: there was no memory for it either."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def share_nbytes(world_size: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """What each of `world_size` ranks may take beyond what it is born with, in bytes; None where nothing is known.

    The variable ZEROBENCH_RANK_MEMORY ("16GB"), else a rank's part of `SHARE` of the memory that is available now, and
    at least `LEAST_NBYTES` if the machine has that. Raises ValueError for a variable that is no amount of memory.
    """
    if wanted := environ.get(VARIABLE, "").strip():
        try:
            return parse_nbytes(wanted)
        except ValueError as error:
            raise ValueError(f"the environment variable {VARIABLE}: {error}") from None
    spare = available_nbytes()
    if spare is None:
        return None
    spare = int(spare * SHARE)
    return max(spare // world_size, min(LEAST_NBYTES, spare))


def available_nbytes() -> int | None:
    """What this machine, or this container, can still give; None where the kernel does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    for most, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(max(int(Path(most).read_text()) - int(Path(used).read_text()), 0))
    return min(found, default=None)


def restrain(nbytes: int | None) -> None:
    """In a rank: from now on at most `nbytes` more than it has; and the first to go where the kernel must choose."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    held = _data_nbytes()
    if nbytes is not None and held is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = held + nbytes if hard == resource.RLIM_INFINITY else min(held + nbytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def relieve() -> None:
    """In a rank that has failed: room again, for it must still say why."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def ran_out(what: str, nbytes: int | None) -> str:
    """`what` with the limit named, where it says that memory was refused; else as it is."""
    if nbytes is None or not _REFUSED.search(what):
        return what
    return f"ran out of its {nbytes_text(nbytes)} ({VARIABLE} gives a rank more): {what}"


def _data_nbytes() -> int | None:
    """Private writable memory of this process, as the limit counts it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return None
