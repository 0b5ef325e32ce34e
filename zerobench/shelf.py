"""Records of a long run, by id: the last ones as they are, the others packed, so that the parent's memory stays flat.

A record of a small model on two ranks is some 0.5 MB of objects, 0.2 MB of JSON and 10 KB packed. Judging goes from case
to case, and a case has fewer runs than are kept as they are: each is unpacked once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, MutableMapping

from zerobench.record import Record

KEPT = 128
"""Records that stay objects. A case of the whole catalogue has some fifty."""


class Shelf(MutableMapping[str, Record]):
    """A dict from a run's id to its record, in the order in which they came. kept: how many stay objects."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = max(1, kept)
        self._packed: dict[str, bytes] = {}
        self._open: dict[str, Record] = {}  # the least recently used first

    def put(self, record: Record, line: bytes) -> None:
        """line: the record as `Writer.write` wrote it."""
        self._packed[record.id] = zlib.compress(line, 1)
        self._use(record.id, record)

    def __setitem__(self, id: str, record: Record) -> None:
        self._packed[id] = zlib.compress(json.dumps(record.to_json(), separators=(",", ":")).encode(), 1)
        self._use(id, record)

    def __getitem__(self, id: str) -> Record:
        record = self._open.get(id)
        if record is None:
            record = Record.from_json(json.loads(zlib.decompress(self._packed[id])))
        self._use(id, record)
        return record

    def __delitem__(self, id: str) -> None:
        del self._packed[id]
        self._open.pop(id, None)

    def __contains__(self, id: object) -> bool:
        return id in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def _use(self, id: str, record: Record) -> None:
        self._open.pop(id, None)
        self._open[id] = record
        while len(self._open) > self._kept:
            del self._open[next(iter(self._open))]
