"""Results on disk: one JSON line a provenance or record, appended when it is known, durable when `write` returns.

An interrupted run keeps what it had. A line is torn only where its newline is missing, which only the last can be;
everything else that cannot be read is refused, with file and line: a verdict from half a file would read as green.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zerobench.record import Provenance, Record
from zerobench.terms import MODEL_STATES, Moment

if TYPE_CHECKING:
    import pandas as pd

MAX_NBYTES = 4 << 30  # of a results file; a larger one is something else
_HEAD = b'{"provenance":'  # how a results file begins


class StoreError(Exception):
    """A results file that cannot be read or written: says which, where, and why."""


@dataclass(frozen=True)
class Results:
    """One file. provenance: of the last session that wrote to it; provenances: of all, by id. records: by run id, in
    order of first appearance, the last one written of each; launches: all that completed, by run id, in file order.
    problems: what was tolerated, a sentence each."""

    path: Path
    provenance: Provenance
    provenances: dict[str, Provenance]
    records: dict[str, Record]
    problems: tuple[str, ...] = ()
    launches: dict[str, list[Record]] = field(default_factory=dict)


def results_path(folder: Path, suite: str, host: str, started: datetime) -> Path:
    """<suite>-<utc>-<host>.jsonl, with characters that a shell or a file system could take amiss replaced by "_"."""
    utc = started.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    return folder / f"{_safe(suite)}-{utc}-{_safe(host)}.jsonl"


class Writer:
    """Appends to `path`, made if absent, its folder too. A torn last line, of a run that was cut off, is removed first.

    A context manager. For one process at a time. Raises StoreError where the file cannot be opened or written, or is
    not a results file: what is not ours is not touched.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}") from error
        try:
            head = os.pread(self._fd, len(_HEAD), 0)
            if head and not _HEAD.startswith(head):
                raise OSError(errno.EINVAL, "not a results file of zerobench")
            os.ftruncate(self._fd, _whole_nbytes(path))
            _sync_folder(path.parent)  # a new file's name is durable only with its folder
        except OSError as error:
            self.close()
            raise StoreError(f"{path}: {error.strerror}") from error

    def write(self, item: Provenance | Record) -> None:
        """Append one line; it is on disk when this returns. After a failure the file is as it was before."""
        line = json.dumps(item.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written")
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> Results:
    """Raises StoreError for a file that is absent, not ours, of a newer schema, or damaged but at its end."""
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_NBYTES:
            raise StoreError(f"{path}: {nbytes} bytes; a results file has at most {MAX_NBYTES}")
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    problems = []
    if lines and not lines[-1].endswith(b"\n"):
        torn = lines.pop()
        problems.append(f"{path}:{len(lines) + 1}: the last line is cut off after {len(torn)} bytes, and was left out")
    provenances: dict[str, Provenance] = {}
    records: dict[str, Record] = {}
    launches: dict[str, list[Record]] = {}
    for number, line in enumerate(lines, 1):
        try:
            _take(line, provenances, records, launches)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path}:{number}: {error}") from error
    if not provenances:
        raise StoreError(f"{path}: no zerobench results in it")
    return Results(path, next(reversed(provenances.values())), provenances, records, tuple(problems), launches)


def _take(
    line: bytes, provenances: dict[str, Provenance], records: dict[str, Record], launches: dict[str, list[Record]]
) -> None:
    data = json.loads(line, parse_constant=_refuse_constant)
    if isinstance(data, dict) and "record" in data:
        record = Record.from_json(data)
        if not provenances:
            raise ValueError("a record before any provenance")
        if record.provenance and record.provenance not in provenances:
            raise ValueError(f"a record of provenance {record.provenance!r}, which is not above it")
        records[record.id] = record
        if record.status == "ok":
            launches.setdefault(record.id, []).append(record)
    elif isinstance(data, dict) and "provenance" in data:
        provenance = Provenance.from_json(data)
        provenances.pop(provenance.id, None)
        provenances[provenance.id] = provenance
    else:
        raise ValueError("neither a record nor a provenance of zerobench")


def frame(results: Results) -> pd.DataFrame:
    """A row a run, in file order. Bytes are the most on any rank; step_s: the median step of the slowest rank."""
    import pandas as pd

    return pd.DataFrame([_row(record) for record in results.records.values()])


def _row(record: Record) -> dict[str, Any]:
    case, samples = record.run.case, record.samples
    row: dict[str, Any] = {
        "id": record.id,
        "suite": record.suite,
        "implementation": case.implementation,
        "model": case.model,
        "world_size": case.world_size,
        "precision": case.precision,
        "micro_batches": case.micro_batches,
        "scenario": record.run.scenario,
        "device": case.device,
        "status": record.status,
        "reason": record.reason,
        "psi": record.model.psi if record.model else None,
        "wall_s": record.wall_s,
    }
    held: dict[str, list[int]] = defaultdict(list)
    for holding in (h for sample in samples for h in sample.holdings if h.moment is Moment.BACKWARD):
        for name, nbytes in holding.claimed.items():
            held[name].append(nbytes)
    for category in MODEL_STATES:
        row[f"{category.value}_nbytes"] = max(held[category.value], default=None)
    row["peak_nbytes"] = max((peak.nbytes for sample in samples for peak in sample.peaks), default=None)
    row["calls"] = max((len(sample.calls) for sample in samples), default=None)
    slowest = [max(times) for times in zip(*(sample.times_s for sample in samples), strict=False)]
    row["step_s"] = statistics.median(slowest) if slowest else None
    return row


def _whole_nbytes(path: Path) -> int:
    """The length of `path` up to its last newline."""
    with path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - 65536)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            at = start
    return 0


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "_"
