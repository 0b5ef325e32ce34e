"""Results on disk: one JSON line a provenance or record, appended when it is known, durable when `write` returns.

An interrupted run keeps what it had. A line is torn only where its newline is missing, which only the last can be;
everything else that cannot be read is refused, with file and line: a verdict from half a file would read as green.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from zerobench.files import json_line, opened
from zerobench.lines import Reader
from zerobench.plausible import implausible
from zerobench.record import UPGRADE, Provenance, Record
from zerobench.terms import MODEL_STATES, Moment

if TYPE_CHECKING:
    import pandas as pd

MAX_NBYTES = 4 << 30  # of a results file; a larger one is something else
MAX_LINE_NBYTES = 64 << 20  # some 2,000 ranks, watched in full; reading may take thirty times as much memory
OTHER = "name a file that `zerobench run` wrote, whole and unchanged"
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

    A context manager. For one process at a time, and a second one is refused. Where the file, or its folder, is removed
    meanwhile, it is made again with all that was in it; `problems` says so. Raises StoreError where the file cannot be
    opened or written, or is not a results file: what is not ours is not touched.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.problems = path, list[str]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}{_todo(error)}") from error
        self._begin()

    @classmethod
    def fresh(cls, path: Path) -> Writer:
        """One on a new file: `path`, or where another run has that name "<stem>-2.jsonl", "-3" and so on."""
        writer = cls.__new__(cls)
        writer.problems = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            writer.path, writer._fd = _create(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be made: {error.strerror}{_todo(error)}") from error
        writer._begin()
        return writer

    def _begin(self) -> None:
        try:
            _lock(self._fd)
            head = os.pread(self._fd, len(_HEAD), 0)
            if head and not _HEAD.startswith(head):
                raise OSError(
                    errno.EINVAL, "not a results file of zerobench, and left as it is; name one, or leave out --resume"
                )
            os.ftruncate(self._fd, _whole_nbytes(self.path))
            _sync_folder(self.path.parent)  # a new file's name is durable only with its folder
        except BlockingIOError as error:
            self._let_go()
            raise StoreError(
                f"{self.path}: another zerobench writes to it; wait for its end, or leave out --resume"
            ) from error
        except OSError as error:
            self._let_go()
            raise StoreError(f"{self.path}: {error.strerror}") from error

    def write(self, item: Provenance | Record) -> bytes:
        """Append one line and return it; it is on disk when this returns. After a failure the file is as it was before."""
        line = json.dumps(item.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._keep()
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written: no space left")
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}{_todo(error)}") from error
        return line

    def _keep(self) -> None:
        """Make the file again if it was removed: as long as it is open, nothing of it is lost."""
        if os.fstat(self._fd).st_nlink:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            path, fd = _create(self.path)
            _lock(fd)
            at = 0
            while part := os.pread(self._fd, 1 << 20, at):
                at += os.write(fd, part)
            os.fsync(fd)
            _sync_folder(path.parent)
        except OSError as error:
            raise StoreError(
                f"{self.path}: was removed while it was written, and cannot be made again: {error.strerror}{_todo(error)}"
            ) from error
        where = "made again" if path == self.path else f"made again as {path}"
        self.problems.append(f"{self.path} was removed while it was written; it is {where}, with all that it had")
        os.close(self._fd)
        self.path, self._fd = path, fd

    def close(self) -> None:
        """Raises StoreError where the file was removed and cannot be made again."""
        if self._fd >= 0:
            try:
                self._keep()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begun(path: Path) -> Results | None:
    """As `read`; None for a file that was cut off before its first line was whole, to which a run may still be added."""
    try:
        with opened(path) as file:
            head = file.read(len(_HEAD))
            if _HEAD.startswith(head) and not _whole_nbytes(path):
                return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {_reason(error)}") from error
    return read(path)


def read(path: Path) -> Results:
    """Raises StoreError for a file that is absent, not ours, of a newer schema, or damaged but at its end."""
    try:
        with opened(path) as file, uncollected():
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > MAX_NBYTES:
                raise StoreError(f"{path}: {nbytes:,} bytes; a results file has at most {MAX_NBYTES:,}: {OTHER}")
            return _read(path, file)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {_reason(error)}") from error


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles: a file of records is millions of objects that stay and have no cycles, and to
    look through them again and again as they come takes longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()  # what was made is old now, and the next short search leaves it out
            gc.enable()


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """What is there now is left out of every search for cycles until the end: for the results that a command has read, and
    keeps for as long as it judges and writes."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _read(path: Path, file: BinaryIO) -> Results:
    problems = []
    provenances: dict[str, Provenance] = {}
    records: dict[str, Record] = {}
    launches: dict[str, list[Record]] = {}
    reader = Reader()
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_NBYTES + 1), b""), 1):
        if len(line) > MAX_LINE_NBYTES:
            raise StoreError(f"{path}:{number}: a line of more than {MAX_LINE_NBYTES:,} bytes: {OTHER}")
        if not line.endswith(b"\n"):
            problems.append(f"{path}:{number}: the last line is cut off after {len(line)} bytes, and was left out")
            break
        try:
            _take(reader, line, provenances, records, launches)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            todo = "" if str(error).endswith(UPGRADE) else f"; {OTHER}"
            raise StoreError(f"{path}:{number}: {error}{todo}") from error
    if not provenances:
        raise StoreError(f"{path}: no zerobench results in it: {OTHER}")
    return Results(path, next(reversed(provenances.values())), provenances, records, tuple(problems), launches)


def _take(
    reader: Reader,
    line: bytes,
    provenances: dict[str, Provenance],
    records: dict[str, Record],
    launches: dict[str, list[Record]],
) -> None:
    record, known = reader.record(line), not reader.new
    data = None if record else json_line(line)
    if record is None and isinstance(data, dict) and "record" in data:
        record = Record.from_json(data)
    if record is not None:
        if wrong := implausible(record, known=known):
            raise ValueError(wrong)
        if not provenances:
            raise ValueError("a record before any provenance")
        if record.provenance and record.provenance not in provenances:
            raise ValueError(f"a record of provenance {record.provenance!r}, which is not above it")
        id = record.id
        records[id] = record
        if record.status == "ok":
            launches.setdefault(id, []).append(record)
    elif isinstance(data, dict) and "provenance" in data:
        provenance = Provenance.from_json(data)
        if wrong := implausible(provenance):
            raise ValueError(wrong)
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
        "launch": case.launch,
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


def _create(path: Path) -> tuple[Path, int]:
    """A new file: two runs of one second and host, or ten, each get one of their own."""
    for number in range(1, 10_000):
        tried = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            return tried, os.open(tried, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    raise OSError(errno.EEXIST, "ten thousand files have that name already")


def _lock(fd: int) -> None:
    """Raises BlockingIOError where another process has it. The lock goes with the process, however that ends; a file
    system without locks goes without."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise


def _todo(error: OSError) -> str:
    """What to do about it, where that can be said."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "; make room, or name another folder with --results"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return "; name another folder with --results"
    return ""


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: OSError | ValueError) -> str:
    """ValueError: a name with a zero byte in it."""
    return getattr(error, "strerror", None) or str(error)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:80] or "_"
