"""Options from a suite for one implementation, with a memory of which were read: an option nobody reads is a typo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Watched(Mapping[str, Any]):
    """A read-only mapping that remembers its reads. Iterating reads everything."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._values)
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        if key in self._values:
            self._read.add(str(key))
        return key in self._values

    def unread(self) -> list[str]:
        return sorted(set(self._values) - self._read)
