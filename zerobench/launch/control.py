"""What the processes of a job say to each other: JSON (never pickle) under keys of one store, and signs of life.

torchrun's agent hosts the store, or process 0. Every process writes a sign of life each `BEAT_S`, from a thread with a
connection of its own: one that is busy is not one that is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from zerobench.launch import meeting
from zerobench.launch.job import Job
from zerobench.launch.nursery import LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

CONNECT_S = 300.0  # for all processes of a job to be there: nodes start one after the other
BEAT_S = 1.0
LOST_S = 15.0  # without a sign of life
WAIT_S = 1.0  # at most in one call of the store, which no signal can interrupt
PIECE_NBYTES = 4 << 20  # torch's store takes 8 MiB in one value
_LEFT = "left: "
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class Control:
    """One process's connection to the others. A context manager. For one thread. Raises LaunchError where the store
    cannot be reached, then or later: the process that hosts it is gone."""

    def __init__(self, job: Job) -> None:
        self.job = job
        _quietly()
        self._server = None if job.hosted or job.rank else meeting.host(job.world_size, job.address, job.port)
        self._store = self._connect()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(self._connect(),), daemon=True, name="zerobench beats")
        self._beats.start()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, key: str, value: Any) -> None:
        """Write what others wait for, once for each key."""
        data = zlib.compress(json.dumps(value, allow_nan=False).encode(), 1)
        pieces = [data[i : i + PIECE_NBYTES] for i in range(0, len(data), PIECE_NBYTES)]
        with self._reaching():
            for i, piece in enumerate(pieces):
                self._store.set(f"{key}/{i}", piece)  # type: ignore[arg-type]  # bytes are fine; the stub is not
            self._store.set(key, str(len(pieces)))

    def hear(self, key: str, *, forget: bool = False) -> Any:
        """What was said under `key`, which `said` has seen. forget: nobody else will ask for it."""
        with self._reaching():
            names = [f"{key}/{i}" for i in range(int(self._store.get(key)))]
            data = b"".join(self._store.get(name) for name in names)
            if forget:
                for name in [key, *names]:
                    self._store.delete_key(name)
        return json.loads(zlib.decompress(data))

    def said(self, key: str, wait_s: float = 0.0) -> bool:
        """Whether something was said under `key`; waits for it, at most `WAIT_S`."""
        with self._reaching():
            if self._store.check([key]):
                return True
            if wait_s <= 0:
                return False
            try:
                self._store.wait([key], timedelta(seconds=min(wait_s, WAIT_S)))
            except RuntimeError as error:
                if type(error).__name__ != "DistStoreError":  # that is the time that has passed
                    raise
                return False
            return True

    def count(self, key: str) -> int:
        """One more under `key`; how many those are now."""
        with self._reaching():
            return int(self._store.add(key, 1))

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of `ranks` that have left, or have given no sign of life for `LOST_S`; each with what is known."""
        ranks = list(ranks)
        with self._reaching():
            there = [rank for rank in ranks if self._seen.get(rank, (b"",))[0] or self._store.check([_pulse(rank)])]
            found = (
                dict(zip(there, self._store.multi_get([_pulse(rank) for rank in there]), strict=True)) if there else {}
            )
        now, out = time.monotonic(), {}
        for rank in ranks:
            beat = found.get(rank, b"")
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
            quiet_s = now - self._seen[rank][1]
            if beat.startswith(_LEFT.encode()):
                out[rank] = beat.decode().removeprefix(_LEFT)
            elif quiet_s > LOST_S:
                out[rank] = f"has given no sign of life for {quiet_s:.0f} s"
        return out

    def close(self, why: str = "has ended") -> None:
        """Leave, saying why. Where this process hosts the store, the store goes with it."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._beats.join(WAIT_S)
        with contextlib.suppress(RuntimeError):  # a store that is gone needs no goodbye
            self._store.set(_pulse(self.job.rank), _LEFT + why)
        self._server = None

    def _connect(self) -> Store:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        job = self.job
        try:
            store: TCPStore = TCPStore(
                job.address, job.port, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
            )
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"process {job.rank} of {job.world_size} (started by {job.name}) found no store at {job.address}:{job.port}: "
                f"{str(error).splitlines()[0]}"
            ) from None
        return PrefixStore(f"zerobench/{job.attempt}", store)

    def _beat(self, store: Store) -> None:
        beats = 0
        while not self._ended.is_set():
            beats += 1
            try:
                store.set(_pulse(self.job.rank), str(beats))
            except RuntimeError:
                return  # the main thread learns it at its next word
            self._ended.wait(BEAT_S)

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise LaunchError(
                f"the store at {self.job.address}:{self.job.port} is gone, and with it the process that hosted it "
                f"({'torchrun' if self.job.hosted else 'process 0'}): {str(error).splitlines()[0]}"
            ) from None


def _pulse(rank: int) -> str:
    return f"pulse/{rank}"


def _quietly() -> None:
    """Import torch so that it does not log each wait that runs out, which is no news here. The ranks' logs are their own."""
    given = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    import torch.distributed  # noqa: F401

    if given is None:
        del os.environ[_LOG_LEVEL]
