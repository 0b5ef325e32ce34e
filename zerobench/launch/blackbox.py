"""What a rank was doing, in a file that outlives it: one line, how often it changed, and its last collectives.

Everything is written with `pwrite`, a microsecond or two, and from then on belongs to the page cache: SIGKILL cannot
take it. The line reads "<phase> of step <k>: <last collective>", or just a phase ("building the model"). The file has
its full length before the subject runs, so that a disk which fills up later stops no note.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zerobench.record import Call

NBYTES = 1024
KEPT = 256  # collectives, the last ones
SLOT_NBYTES = 256
_BEAT = struct.Struct("<Qd")  # notes so far, and when the last was written (CLOCK_MONOTONIC, one for all processes)
_FIRST_SLOT = NBYTES + 64
_WHITE = re.compile(r"\s")
_LINE = re.compile(r"(?P<phase>.+?) of step (?P<step>-?\d+)(?:: (?P<call>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A collective that a rank entered. ordinal: its number among this rank's in that group, from 1. text: its kind and
    size as a person reads them ("all-reduce of 100 fp32"); what must be alike on all ranks of the group is `key`."""

    group: str  # "0-3", or "0-3 (its name)" where it is not the default group
    ordinal: int
    text: str
    key: str


@dataclass(frozen=True)
class Beat:
    """notes: written so far. at_s: when the last was, in seconds of `time.monotonic`."""

    notes: int = 0
    at_s: float = 0.0


class BlackBox:
    """The writing end, in the rank. Raises OSError where the disk has no room for the file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, _FIRST_SLOT + KEPT * SLOT_NBYTES)
        self._notes = self._entries = 0
        self._ordinals: Counter[str] = Counter()

    def note(self, text: str) -> None:
        """Replace the line. What does not fit into `NBYTES` bytes is cut off."""
        self._notes += 1
        beat = _BEAT.pack(self._notes, time.monotonic())
        os.pwrite(self._fd, text.encode("utf-8", "replace")[:NBYTES].ljust(NBYTES, b"\0") + beat, 0)

    def entered(self, call: Call) -> None:
        """Add a collective to the last ones. One between two ranks of a group has no number in it and is left out."""
        if call.kind.value in _BETWEEN_TWO:
            return
        group = _ranges(call.group) + (f" ({_WHITE.sub(' ', call.communicator)})" if call.communicator else "")
        self._ordinals[group] += 1
        size = "" if call.kind.value in _UNEVEN else f"{call.numel} {call.dtype}"
        key = f"{call.kind.value} {size} {call.root}"
        text = f"{call.kind.value} of {call.numel} {call.dtype}" + (
            f", root {call.root}" if call.root is not None else ""
        )
        line = "\t".join((group, str(self._ordinals[group]), text, key))
        slot = line.encode("utf-8", "replace")[:SLOT_NBYTES].ljust(SLOT_NBYTES, b"\0")
        os.pwrite(self._fd, slot, _FIRST_SLOT + self._entries % KEPT * SLOT_NBYTES)
        self._entries += 1


_BETWEEN_TWO = ("send", "recv")
_UNEVEN = ("all-to-all", "barrier")  # ranks may give different amounts, or none


def read(path: Path) -> str:
    """The last line noted; "" if there was none."""
    return _bytes(path)[:NBYTES].rstrip(b"\0").decode("utf-8", "replace")


def beat(path: Path) -> Beat:
    """How often the rank has noted something, and when last."""
    data = _bytes(path)
    return Beat(*_BEAT.unpack_from(data, NBYTES)) if len(data) >= NBYTES + _BEAT.size else Beat()


def entries(path: Path) -> list[Entry]:
    """The last collectives in no particular order; one that was being written when the rank died is left out."""
    data = _bytes(path)[_FIRST_SLOT:]
    out = []
    for start in range(0, len(data), SLOT_NBYTES):
        parts = data[start : start + SLOT_NBYTES].rstrip(b"\0").decode("utf-8", "replace").split("\t")
        if len(parts) == 4 and parts[1].isdecimal():
            out.append(Entry(parts[0], int(parts[1]), parts[2], parts[3]))
    return out


def parse(line: str) -> tuple[str, int, str]:
    """(phase, step, last collective) of a line; the step is -1 and the collective "" where it names none."""
    found = _LINE.fullmatch(line)
    if found is None:
        return line, -1, ""
    return found["phase"], int(found["step"]), found["call"] or ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the rank died before it had one
        return b""


def _ranges(ranks: tuple[int, ...]) -> str:
    """ "0-3,5": short also for a thousand ranks; out of order as they come, since the order is part of the group."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in parts)
