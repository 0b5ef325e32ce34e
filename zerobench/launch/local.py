"""Runs on this machine: fresh ranks for each, forked from a process that has torch imported.

    with Local() as local:
        record = local.launch(case.run("plain"), deadline_s=60)

The first launch waits for the import of torch (seconds); a later one at n = 2 costs some 40 ms. Ranks meet on
127.0.0.1 alone: torch's own store would listen on every interface, without authentication (pytorch issue 173909).
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench import accelerators
from zerobench.case import Run
from zerobench.launch import folders, limits, meeting
from zerobench.launch.autopsy import End
from zerobench.launch.blackbox import Entry
from zerobench.launch.crew import Crew, Others
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

    def ready(self) -> None:
        """Start the fork server, and wait until it has imported torch. Raises LaunchError."""
        self._nursery.start()
        self._nursery.sweep()

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
        ends, logs = self.part(run, places, deadline_s=deadline_s, target=target, memory_nbytes=memory_nbytes)
        refuse_unable(ends)
        wall_s = time.monotonic() - began
        return merge(run, ends, suite=suite, deadline_s=deadline_s, wall_s=wall_s, logs=logs, load=overload())

    def part(
        self,
        run: Run,
        places: Mapping[int, Place],
        *,
        deadline_s: float,
        target: str = WORKER,
        memory_nbytes: int | None = None,
        others: Others | None = None,
        shared: Path | None = None,
        **surroundings: Any,
    ) -> tuple[list[End], dict[int, list[Entry]]]:
        """The ranks of `run` in `places`, from birth to death: how each ended, and its last collectives.

        others: the rest of the ranks, which other launchers have. shared: the folder that all share, where it is not
        this launcher's own to make. surroundings: fields of `Order`; the port of a rendezvous that somebody else hosts
        is among them. memory_nbytes: see `Order`. Raises as `launch`.
        """
        scratch = self._scratch()
        try:
            if shared is None:
                self._share(run, scratch / "shared")
            else:
                (scratch / "shared").symlink_to(shared)
            store = None if "port" in surroundings else self._rendezvous(run)
            with Crew(self._nursery) as crew:
                common = {
                    "port": store.port if store else 0,
                    "target": target,
                    "deadline_s": deadline_s,
                    "scratch": str(scratch),
                    **surroundings,
                }
                common["memory_nbytes"] = memory_nbytes if run.case.device == "cpu" else None  # CUDA maps far more
                common["cwd"] = _cwd()
                for rank, place in places.items():
                    crew.add(_order(run, rank, place, **common))
                crew.watch(deadline_s, others)
                return crew.stop(), crew.logs
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
        return meeting.host(run.case.world_size)

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
        kept = self._nursery.folder / "checkpoints" / folders.name(run.checkpoint)
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


def refuse_unable(ends: Sequence[End]) -> None:
    """Raises LaunchError where a rank could not be set up: what came of the run says nothing about its subject."""
    for end in ends:
        if end.outcome is not None and end.outcome.status == UNABLE:
            raise LaunchError(f"rank {end.rank} could not be set up: {end.outcome.reason}; {SPACE}")
