"""Workers for the launcher's tests: each does one thing, well or badly. They run in ranks, by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from zerobench.case import Run
from zerobench.claims import Claims
from zerobench.rank import Outcome, RankContext
from zerobench.record import Report, Sample
from zerobench.terms import Stage


def _fine(context: RankContext, **changes: object) -> Outcome:
    outcome = Outcome("ok", Sample(context.rank), claims=Claims(Stage.DDP))
    return replace(outcome, **changes)  # type: ignore[arg-type]


def _all_reduce(context: RankContext) -> float:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def _join(context: RankContext) -> None:
    """Rank 0 says first where it will be: rank 1 may be gone before rank 0 has left `join`."""
    if context.rank == 0:
        context.note("backward of step 3: all-reduce of 1 fp32 in ranks 0,1")
    context.join()


def adds(run: Run, context: RankContext) -> Outcome:
    """Joins, adds ones over the ranks, returns the sum as a loss."""
    context.join()
    return _fine(context, sample=Sample(context.rank, reports=(Report(0, _all_reduce(context)),)))


def nothing(run: Run, context: RankContext) -> Outcome:
    return _fine(context)


def imported(run: Run, context: RankContext) -> Outcome:
    """Which adapters of FSDP the rank was born with."""
    names = sorted(m.rpartition(".")[2] for m in sys.modules if m.startswith("zerobench.implementations.fsdp"))
    return _fine(context, sample=Sample(context.rank, changed=tuple(names)))


def surroundings(run: Run, context: RankContext) -> Outcome:
    """What a plug-in finds around it, as a reason; and a second group over env://, as third parties open one."""
    import torch
    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    facts = [f"{name}={os.environ[name]}" for name in names]
    facts += [f"MARK={os.environ.get('ZEROBENCH_MARK')}", f"threads={torch.get_num_threads()}", f"cwd={os.getcwd()}"]
    facts += [f"shared={sorted(p.name for p in context.scratch.iterdir())}", f"stdin={sys.stdin.read()!r}"]
    context.join()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    facts.append(f"env://={_all_reduce(context):g}")
    return _fine(context, status="invalid", reason="\n".join(facts))


def megabytes(run: Run, context: RankContext) -> Outcome:
    return _fine(context, sample=Sample(context.rank, changed=("x" * 5_000_000,)))


def raises(run: Run, context: RankContext) -> Outcome:
    """Rank 1 raises while the others wait for it."""
    _join(context)
    if context.rank == 1:
        context.note("forward of step 2")
        raise ZeroDivisionError("planted")
    return _fine(context, reason=str(_all_reduce(context)))


def exits(run: Run, context: RankContext) -> Outcome:
    _join(context)
    if context.rank == 1:
        print("about to leave")
        os._exit(3)
    return _fine(context, reason=str(_all_reduce(context)))


def calls_sys_exit(run: Run, context: RankContext) -> Outcome:
    sys.exit(4)


def killed(run: Run, context: RankContext) -> Outcome:
    _join(context)
    if context.rank == 1:
        context.note("step of step 1")
        os.kill(os.getpid(), signal.SIGKILL)
    return _fine(context, reason=str(_all_reduce(context)))


def sleeps(run: Run, context: RankContext) -> Outcome:
    """Rank 1 does not come to the collective: it hangs in Python."""
    _join(context)
    if context.rank == 1:
        oversleep()
    return _fine(context, reason=str(_all_reduce(context)))


def oversleep() -> None:
    time.sleep(600)


def mismatch(run: Run, context: RankContext) -> Outcome:
    """Rank 0 enters a collective more than rank 1, which leaves."""
    _join(context)
    _all_reduce(context)
    if context.rank == 0:
        _all_reduce(context)
    return _fine(context)


def floods(run: Run, context: RankContext) -> Outcome:
    """64 MB of output, then a failure."""
    for _ in range(1000):
        os.write(1, b"flood " * 10_666 + b"\n")
    print("the last word", file=sys.stderr)
    raise RuntimeError("drowned")


def garbles(run: Run, context: RankContext) -> Outcome:
    """Writes into every descriptor that is a socket, its own channel too."""
    import socket
    import stat

    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                socket.socket(fileno=os.dup(fd)).send(b"\xff" * 64)
        except OSError:
            continue
    oversleep()
    return _fine(context)


def half_skips(run: Run, context: RankContext) -> Outcome:
    return _fine(context, status="skip", reason="odd") if context.rank else _fine(context)


def all_skip(run: Run, context: RankContext) -> Outcome:
    return _fine(context, status="skip", reason="no such thing")


def claims_differ(run: Run, context: RankContext) -> Outcome:
    return _fine(context, claims=Claims(Stage(context.rank)))


def returns_none(run: Run, context: RankContext) -> None:
    return None


def leaves_children(run: Run, context: RankContext) -> Outcome:
    """One child in the rank's group, one in a session of its own. Their pids go into the launcher's folder."""
    children = [subprocess.Popen(["sleep", "600"], start_new_session=away) for away in (False, True)]
    Path(run.case.options["pids"], f"{context.rank}").write_text(" ".join(str(c.pid) for c in children))
    return _fine(context)


def never_ends(run: Run, context: RankContext) -> Outcome:
    """Rank 0 hangs in C with the GIL held, the others in Python; each has a child. Pids are written first."""
    child = subprocess.Popen(["sleep", "600"])
    Path(run.case.options["pids"], f"{context.rank}").write_text(f"{os.getpid()} {child.pid}")
    if context.rank == 0:
        ctypes.PyDLL(None).sleep(600)  # PyDLL, unlike CDLL, keeps the GIL
    oversleep()
    return _fine(context)
