"""Runs on this machine: fresh ranks for each, forked from a process that has torch imported.

    with Local() as local:
        record = local.launch(case.run("plain"), deadline_s=60)

The first launch waits for the import of torch (seconds); a later one at n = 2 costs some 40 ms. Ranks meet on
127.0.0.1 alone: torch's own store would listen on every interface, without authentication (pytorch issue 173909).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench import accelerators
from zerobench.case import Run
from zerobench.launch import folders, limits
from zerobench.launch.autopsy import End
from zerobench.launch.crew import Crew
from zerobench.launch.merge import merge
from zerobench.launch.nursery import PRELOAD, Nursery
from zerobench.launch.nursery import LaunchError as LaunchError
from zerobench.launch.ranks import Order
from zerobench.launch.vigil import overload
from zerobench.rank import UNABLE
from zerobench.readings import Place
from zerobench.record import Record

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

WORKER = "zerobench.worker:work"
LOOPBACK_S = 5.0  # for a connection from this process to itself
SPACE = "ranks need a folder with room in it; TMPDIR names another"


class Local:
    """A launcher of local ranks, one run at a time, from one thread. A context manager; `close` ends its processes."""

    def __init__(self, *, preload: Sequence[str] = PRELOAD) -> None:
        self._nursery = Nursery(preload)

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def server_pid(self) -> int | None:
        """The fork server's process id, while there is one."""
        return self._nursery.pid

    def warm(self) -> None:
        """Start the fork server; returns at once, and the import of torch goes on beside the caller."""
        self._nursery.start()

    def launch(self, run: Run, *, deadline_s: float, suite: str = "", target: str = WORKER) -> Record:
        """Do `run` on `run.case.world_size` new ranks, more than there are cores if need be, and merge what they say.

        deadline_s: from the birth of the last rank. target: "module:function" of (Run, RankContext) -> Outcome.
        Where the run wants GPUs that are not there, no rank is born and the record is a skip.
        Whatever a rank does is in the record (`Failure`). Raises LaunchError where the machinery itself failed, and
        KeyboardInterrupt; no process, descriptor or file of the run is left in either case.
        """
        try:
            places = self._places(run)
        except accelerators.NoDevice as reason:
            return Record(suite, run, "skip", str(reason))
        try:
            memory_nbytes = limits.share_nbytes(len(places))
        except ValueError as error:
            raise LaunchError(str(error)) from None
        began = time.monotonic()
        scratch = self._scratch()
        try:
            self._share(run, scratch / "shared")
            store = self._rendezvous(run)
            with Crew(self._nursery) as crew:
                common = {
                    "target": target,
                    "port": store.port if store else 0,
                    "deadline_s": deadline_s,
                    "scratch": str(scratch),
                }
                common["memory_nbytes"] = memory_nbytes if run.case.device == "cpu" else None  # CUDA maps far more
                common["cwd"] = _cwd()
                for rank, place in places.items():
                    crew.add(_order(run, rank, place, **common))
                crew.watch(deadline_s)
                ends = crew.stop()
            _refuse_unable(ends)
            wall_s = time.monotonic() - began
            return merge(run, ends, suite=suite, deadline_s=deadline_s, wall_s=wall_s, logs=crew.logs, load=overload())
        except OSError as error:
            self.close()
            raise LaunchError(_told(error, scratch)) from error
        except BaseException:
            self.close()  # with it go the ranks, in whatever state they are
            raise
        finally:
            folders.remove(scratch)

    def close(self) -> None:
        """End the fork server, and with it every rank, and what they left in files. A later launch starts another."""
        self._nursery.close()

    def _places(self, run: Run) -> dict[int, Place]:
        """The ranks that are born, and where. Raises NoDevice."""
        return dict(enumerate(accelerators.places(run.case.device, run.case.world_size)))

    def _rendezvous(self, run: Run) -> TCPStore | None:
        """Where the ranks meet; None where none looks for another."""
        return _rendezvous(run.case.world_size)

    def _scratch(self) -> Path:
        """A new folder for one run, inside the launcher's."""
        self._nursery.ensure()
        try:
            return Path(tempfile.mkdtemp(prefix="run-", dir=self._nursery.folder))
        except OSError as error:
            raise LaunchError(_told(error, self._nursery.folder)) from error

    def _share(self, run: Run, folder: Path) -> None:
        """Make the folder that all ranks share: new and empty, or what an earlier run of this launcher saved there."""
        if run.checkpoint is None:
            folder.mkdir()
            return
        kept = self._nursery.folder / "checkpoints" / hashlib.sha256(run.checkpoint.encode()).hexdigest()[:32]
        if run.saved_at is None:
            folders.remove(kept)
        kept.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(kept)


def _order(run: Run, rank: int, place: Place, **common: Any) -> Order:
    return Order(
        rank=rank,
        world_size=run.case.world_size,
        run=run.to_json(),
        place=asdict(place),
        environ=dict(os.environ),
        path=tuple(sys.path),
        **common,
    )


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the folder that zerobench was started in is gone; start it in one that stays") from None


def _told(error: OSError, folder: Path) -> str:
    """What the machine refused, and what to do."""
    todo = {errno.EMFILE: "; raise the limit of open files (ulimit -n)", errno.ENFILE: "; too many files are open"}
    return f"{error.filename or folder}: {error.strerror}{todo.get(error.errno or 0, f'; {SPACE}')}"


def _refuse_unable(ends: Sequence[End]) -> None:
    """Raises LaunchError where a rank could not be set up: what came of the run says nothing about its subject."""
    for end in ends:
        if end.outcome is not None and end.outcome.status == UNABLE:
            raise LaunchError(f"rank {end.rank} could not be set up: {end.outcome.reason}; {SPACE}")


def _rendezvous(world_size: int) -> TCPStore:
    """A store that listens on 127.0.0.1 only, on a port that the kernel chose and nobody can take in between.

    The launcher hosts it, and no rank, so that the death of a rank is not also the death of the store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(4 * world_size)
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), LOOPBACK_S):
                pass  # torch would try for minutes
            with contextlib.suppress(OSError):
                listener.settimeout(LOOPBACK_S)
                listener.accept()[0].close()
            listener.settimeout(None)
            return TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"127.0.0.1 cannot be used, and ranks meet there: {error}; is the loopback interface up (ip link set lo up)?"
        ) from error
