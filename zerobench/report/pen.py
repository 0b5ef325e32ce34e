"""Charts, drawn by a process beside the one that reads and judges: matplotlib takes half a second before its first line.

The process is forked before a result is read. It ends with the one that it draws for, however that ends: its end of the
pipe is closed then. Where there is no such process, or no more, charts are drawn where they are asked for.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from zerobench.report import charts

Task = tuple[Callable[..., None], dict[str, Any]]


class Drawing:
    """A chart on a page, there once the page asks for it."""

    def __init__(self, pen: Pen, number: int) -> None:
        self._pen, self._number = pen, number

    def __html__(self) -> str:
        return self._pen.drawn(self._number)


class Pen:
    """A context manager. beside: draw in a process of its own, which begins now."""

    def __init__(self, *, beside: bool = False) -> None:
        self._tasks: list[Task] = []
        self._drawn: list[str | charts.NoMatplotlib] = []
        self._pipe: Connection | None = None
        if beside and sys.platform == "linux":
            fork = multiprocessing.get_context("fork")
            mine, theirs = fork.Pipe()
            self.process = fork.Process(target=_draw_all, args=(theirs, mine), daemon=True)
            try:
                self.process.start()
            except OSError:  # no process to be had
                mine.close()
            else:
                self._pipe = mine
            theirs.close()

    def svg(self, draw: Callable[..., None], **how: Any) -> Drawing:
        """As `charts.svg`, later. draw: something that can be pickled. Not after the first chart is asked for."""
        self._tasks.append((draw, how))
        return Drawing(self, len(self._tasks) - 1)

    def drawn(self, number: int) -> str:
        """Raises charts.NoMatplotlib."""
        if self._pipe and not self._drawn:
            self._send()
        while len(self._drawn) <= number:
            self._drawn.append(self._next())
        found = self._drawn[number]
        if isinstance(found, charts.NoMatplotlib):
            raise found
        return found

    def _send(self) -> None:
        try:
            self._pipe.send(self._tasks)  # type: ignore[union-attr]
        except OSError:
            self.close()

    def _next(self) -> str | charts.NoMatplotlib:
        if self._pipe:
            try:
                return self._pipe.recv()  # type: ignore[no-any-return]
            except (OSError, EOFError):
                self.close()
        return _draw(*self._tasks[len(self._drawn)])

    def close(self) -> None:
        if self._pipe:
            self._pipe.close()
            self._pipe = None

    def __enter__(self) -> Pen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _draw(draw: Callable[..., None], how: dict[str, Any]) -> str | charts.NoMatplotlib:
    try:
        return charts.svg(draw, **how)
    except charts.NoMatplotlib as missing:
        return missing


def _draw_all(pipe: Connection, others: Connection) -> None:
    """In the process beside: draws what it is sent, once, and ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other one says what there is to say
    others.close()
    _draw(_nothing, {"key": "warm", "title": "", "about": "", "size": (1, 1), "frame": (0, 0, 0, 0)})
    try:
        for draw, how in pipe.recv():
            pipe.send(_draw(draw, how))
    except (EOFError, OSError):
        return  # there is nobody left to draw for


def _nothing(axes: Any) -> None:
    axes.set_yticks([])
