"""One step on one rank, event by event: every change of the ledger's bytes, every collective, every phase.

Bytes are given to categories afterwards: a storage counts under the model state that claimed most of it at any moment
of the step (its beginning, and each `claim`), for as long as it lived; one that nobody claimed is "unclaimed" (an
activation, a bucket, a temporary), one that the communication backend made inside a collective is "backend". What the
suite itself makes while it reads is left out. Followed steps are slow: an operator costs some 13 us in the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerobench.probes.ledger import Ledger
from zerobench.probes.storages import Entry, Role
from zerobench.probes.traffic import Tap
from zerobench.record import Call
from zerobench.terms import MODEL_STATES, Category

SERIES = (*(c.value for c in MODEL_STATES), "unclaimed", "backend")
POINTS = 20_000
"""Most readings of the bytes that a rank keeps; of more, each run of neighbours is represented by its highest and its
last."""

Event = dict[str, Any]


class Untraced:
    """What stands in for a trace where none is asked for: it does nothing."""

    def claim(self, claims: Mapping[Category, Sequence[Tensor]]) -> None:
        pass

    def slice(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, name: str) -> None:
        pass


class StepTrace(Untraced):
    """From `begin` to `end` it follows `ledger` and `tap`; `events` are then Trace Event objects, in nanoseconds of the
    machine's monotonic clock, which all ranks of a machine share.

    asynchronous: whether a collective that has been issued may tell when it is done (most of gloo's do; NCCL's works
    are done for the host as soon as they are enqueued). A slice says whether it ends at completion or with the issuing.
    """

    def __init__(self, ledger: Ledger, tap: Tap, *, asynchronous: bool) -> None:
        self._ledger, self._tap, self._asynchronous = ledger, tap, asynchronous
        self._changes: list[tuple[int, Entry, int]] = []
        self._labels: dict[int, dict[Category, int]] = {}
        self._slices: list[tuple[str, int, int]] = []
        self._marks: list[tuple[int, str]] = []
        self._reads: list[tuple[int, int]] = []
        self._calls: list[tuple[list[Call], list[int]]] = []  # with start, end of the issuing, and end where it is told
        self._span = [0, 0]

    def begin(self, claims: Mapping[Category, Sequence[Tensor]]) -> None:
        now = time.monotonic_ns()
        self._span[0] = now
        self._changes = [(now, entry, entry.nbytes) for entry in self._ledger.follow(self._changed)]
        self.claim(claims)
        self._tap.around = self._around

    def end(self) -> None:
        self._tap.around = None
        self._ledger.follow(None)
        self._span[1] = time.monotonic_ns()

    def claim(self, claims: Mapping[Category, Sequence[Tensor]]) -> None:
        """The engine's model states at a moment of the step."""
        for category, entry, nbytes in self._ledger.claimed(claims):
            found = self._labels.setdefault(id(entry), {})  # entries are kept in `_changes`: their ids stay theirs
            found[category] = max(found.get(category, 0), nbytes)

    @contextmanager
    def slice(self, name: str) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._slices.append((name, start, time.monotonic_ns()))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the suite reads: shown as such, and without readings of the bytes."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._reads.append((start, time.monotonic_ns()))

    def mark(self, name: str) -> None:
        """An instant: a boundary between two units."""
        self._marks.append((time.monotonic_ns(), name))

    # -- what is followed ----------------------------------------------------------------------------------------------

    def _changed(self, entry: Entry, nbytes: int) -> None:
        self._changes.append((time.monotonic_ns(), entry, nbytes))

    def _around(self, calls: list[Call], issue: Callable[[], Any]) -> Any:
        times = [time.monotonic_ns(), 0, 0]
        self._calls.append((calls, times))
        out = issue()
        times[1] = time.monotonic_ns()
        if self._asynchronous:

            def done(_: Any) -> None:
                times[2] = time.monotonic_ns()

            for work in _works(out):
                with suppress(RuntimeError):  # gloo's reduce-scatter has no future
                    work.get_future().add_done_callback(done)
        return out

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.events()))

    def events(self) -> list[Event]:
        """Counters "C", slices "X" and instants "i", without process and in nanoseconds; in order of time."""
        found = [
            {"ph": "C", "name": "live bytes", "ts": ts, "args": dict(zip(SERIES, row, strict=True))}
            for ts, row in _thinned(self._readings())
        ]
        found += [_slice("phases", name, *span) for name, *span in self._slices]
        found += [_slice("phases", "the suite reads (not the subject)", *span) for span in self._reads]
        found += [{"ph": "i", "s": "t", "track": "phases", "name": name, "ts": ts} for ts, name in self._marks]
        for calls, (start, issued, told) in self._calls:
            for call in calls:
                what = {
                    "elements": call.numel,
                    "bytes": call.nbytes,
                    "dtype": call.dtype,
                    "ranks": ",".join(map(str, call.group)),
                    "operator": call.op,
                    "thread": call.by,
                    "ends": "completed" if told else "issued",
                }
                found.append(_slice("collectives", call.kind.value, start, max(issued, told)) | {"args": what})
        return sorted(found, key=lambda event: int(event["ts"]))

    def _readings(self) -> list[tuple[int, tuple[int, ...]]]:
        now, held, rows = dict.fromkeys(SERIES, 0), dict[int, int](), list[tuple[int, tuple[int, ...]]]()
        for ts, entry, nbytes in self._changes:
            if entry.role is Role.BACKGROUND:  # in the end it was the suite's, or there before
                continue
            now[self._series(entry)] += nbytes - held.get(id(entry), 0)
            held[id(entry)] = nbytes
            row = tuple(now.values())
            if rows and rows[-1][0] == ts:
                rows[-1] = (ts, row)
            elif not rows or rows[-1][1] != row:
                rows.append((ts, row))
        quiet = [row for row in rows if not any(start < row[0] < end for start, end in self._reads)]
        return [*quiet, (self._span[1], rows[-1][1])] if rows else []

    def _series(self, entry: Entry) -> str:
        if entry.role is Role.BACKEND:
            return "backend"
        labels = self._labels.get(id(entry))
        return max(MODEL_STATES, key=lambda c: labels.get(c, 0)).value if labels else "unclaimed"


def _slice(track: str, name: str, start: int, end: int) -> Event:
    return {"ph": "X", "track": track, "name": name, "ts": start, "dur": max(end - start, 0)}


def _works(out: Any) -> list[torch.distributed.Work]:
    """The works among what an operator of c10d returns."""
    parts = out if isinstance(out, (tuple, list)) else [out]
    return [torch.distributed.Work.unbox(part) for part in parts if isinstance(part, torch.ScriptObject)]


def _thinned(rows: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    width = -(-2 * len(rows) // POINTS)
    if width <= 2:
        return rows
    kept = []
    for at in range(0, len(rows), width):
        part = rows[at : at + width]
        top = max(part, key=lambda row: sum(row[1]))
        kept += [top] if top is part[-1] else [top, part[-1]]
    return kept
