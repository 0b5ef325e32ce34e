"""Runs on this machine: fresh ranks for each, forked from a process that has torch imported.

    with Local() as local:
        record = local.launch(case.run("plain"), deadline_s=60)

The first launch waits for the import of torch (seconds); a later one at n = 2 costs some 40 ms. Ranks meet on
127.0.0.1 alone: torch's own store would listen on every interface, without authentication (pytorch issue 173909).
"""

from __future__ import annotations

import hashlib
import os
import shutil
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
from zerobench.launch.crew import Crew
from zerobench.launch.merge import merge
from zerobench.launch.nursery import PRELOAD, Nursery
from zerobench.launch.nursery import LaunchError as LaunchError
from zerobench.launch.ranks import Order
from zerobench.readings import Place
from zerobench.record import Record

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

WORKER = "zerobench.worker:work"


class Local:
    """A launcher of local ranks, one run at a time, from one thread. A context manager; `close` ends its processes."""

    def __init__(self, *, preload: Sequence[str] = PRELOAD) -> None:
        self._nursery = Nursery(preload)
        self._checkpoints: tempfile.TemporaryDirectory[str] | None = None

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
            places = accelerators.places(run.case.device, run.case.world_size)
        except accelerators.NoDevice as reason:
            return Record(suite, run, "skip", str(reason))
        began = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="zerobench-"))
        try:
            self._share(run, scratch / "shared")
            store = _rendezvous(run.case.world_size)
            with Crew(self._nursery) as crew:
                common = {"target": target, "port": store.port, "deadline_s": deadline_s, "scratch": str(scratch)}
                for rank, place in enumerate(places):
                    crew.add(_order(run, rank, place, **common))
                crew.watch(deadline_s)
                ends = crew.stop()
            return merge(run, ends, suite=suite, deadline_s=deadline_s, wall_s=time.monotonic() - began)
        except BaseException:
            self.close()  # with it go the ranks, in whatever state they are
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def close(self) -> None:
        """End the fork server, and with it every rank. A later launch starts another."""
        self._nursery.close()
        if self._checkpoints is not None:
            self._checkpoints.cleanup()
            self._checkpoints = None

    def _share(self, run: Run, folder: Path) -> None:
        """Make the folder that all ranks share: new and empty, or what an earlier run of this launcher saved there."""
        if run.checkpoint is None:
            folder.mkdir()
            return
        if self._checkpoints is None:
            self._checkpoints = tempfile.TemporaryDirectory(prefix="zerobench-checkpoints-")
        kept = Path(self._checkpoints.name, hashlib.sha256(run.checkpoint.encode()).hexdigest()[:32])
        if run.saved_at is None:
            shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(exist_ok=True)
        folder.symlink_to(kept)


def _order(run: Run, rank: int, place: Place, **common: Any) -> Order:
    return Order(
        rank=rank,
        world_size=run.case.world_size,
        run=run.to_json(),
        place=asdict(place),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        path=tuple(sys.path),
        **common,
    )


def _rendezvous(world_size: int) -> TCPStore:
    """A store that listens on 127.0.0.1 only, on a port that the kernel chose and nobody can take in between.

    The launcher hosts it, and no rank, so that the death of a rank is not also the death of the store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4 * world_size)
        port = listener.getsockname()[1]
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
