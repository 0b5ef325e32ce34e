"""A fault as a row of the matrix, and what can be wrong with how zerobench took it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from zerobench.tests.faults.bench import Bench


class Wrong(AssertionError):
    """What a fault brought about that it must not. kind: one of `KINDS`."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


KINDS = ("case lost", "process left", "file left", "wrong verdict", "not told")


class NotHere(Exception):
    """This fault cannot be made on this machine; the reason."""


@dataclass(frozen=True)
class Row:
    """done: what happens. kept: what must remain. act: does it and returns what the user saw, in a line; raises `Wrong`.
    times: how many faults it is; quick_times: in the quick part, if fewer. quick: part of the ordinary tests."""

    chapter: str
    name: str
    done: str
    kept: str
    act: Callable[[Bench], str]
    quick: bool = False
    times: int = 1
    quick_times: int = 0


@dataclass(frozen=True)
class Result:
    row: Row
    seen: str
    wrong: tuple[str, ...] = ()  # kinds
    skipped: bool = False
    seconds: float = 0.0
    times: int = 1


def tried(row: Row, bench: Bench) -> Result:
    """The row's result, whatever it raises; afterwards nothing may be left of it."""
    began = time.monotonic()
    wrong: list[str] = []
    try:
        seen = row.act(bench)
    except NotHere as reason:
        return Result(row, f"not tried: {reason}", skipped=True)
    except Wrong as error:
        seen, wrong = str(error), [error.kind]
    except Exception:
        seen, wrong = traceback.format_exc(limit=-3), ["not told"]
    if left := bench.left():
        seen, wrong = f"{seen}; left: {left}", [*wrong, "process left" if "process" in left else "file left"]
    times = row.times if bench.whole else row.quick_times or row.times
    return Result(row, seen, tuple(wrong), seconds=time.monotonic() - began, times=times)
