"""Charts, drawn by processes beside the one that reads and judges: matplotlib takes half a second before its first line, and
a page has some dozens of charts.

The processes are forked before a result is read. They end with the one that they draw for, however that ends: its end of
their pipes is closed then. Where there is no such process, or no more, a chart is drawn where the page asks for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import cycle
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType
from typing import Any

from zerobench.report import charts


class Drawing:
    """A chart on a page, there once the page asks for it. draw, how: for `charts.svg`; the first can be pickled."""

    def __init__(self, draw: Callable[..., None], how: dict[str, Any]) -> None:
        self.draw, self.how = draw, how
        self.drawn: Future[str | charts.NoMatplotlib | None] = Future()

    def __html__(self) -> str:
        """Raises charts.NoMatplotlib."""
        found = self.drawn.result() or _draw(self.draw, self.how)
        if isinstance(found, charts.NoMatplotlib):
            raise found
        return found


class Pen:
    """A context manager. beside: in how many processes of its own it draws, which begin now."""

    def __init__(self, *, beside: int = 0) -> None:
        self.helpers: list[Helper] = []
        try:
            for _ in range(beside if sys.platform == "linux" else 0):
                self.helpers.append(Helper([helper.pipe for helper in self.helpers]))
        except OSError:  # no process to be had
            pass
        for helper in self.helpers:  # after the last fork: a process that has threads should not be
            helper.thread.start()
        self._turns = cycle(self.helpers)

    def svg(self, draw: Callable[..., None], **how: Any) -> Drawing:
        """As `charts.svg`, later. draw: something that can be pickled."""
        drawing = Drawing(draw, how)
        if self.helpers:
            next(self._turns).give(drawing)
        else:
            drawing.drawn.set_result(None)
        return drawing

    def __enter__(self) -> Pen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for helper in self.helpers:
            helper.end()


class Helper:
    """A process that draws, and the thread that takes what it has drawn. others: pipes of those that came before it, which
    it must not keep open."""

    def __init__(self, others: Iterable[Connection]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_draw_all, args=(theirs, [*others, self.pipe]), daemon=True)
        try:
            self.process.start()
        except OSError:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        self.thread = Thread(target=self._take, daemon=True)
        self._waiting: deque[Drawing] = deque()

    def give(self, drawing: Drawing) -> None:
        self._waiting.append(drawing)
        try:
            self.pipe.send((drawing.draw, drawing.how))
        except OSError:  # it has ended
            self._leave_the_rest()

    def _take(self) -> None:
        try:
            while True:
                found = self.pipe.recv()
                self._waiting.popleft().drawn.set_result(found)
        except (EOFError, OSError):
            self._leave_the_rest()

    def _leave_the_rest(self) -> None:
        """To who asks for it."""
        while self._waiting:
            try:
                self._waiting.popleft().drawn.set_result(None)
            except IndexError:  # the other thread took it
                return

    def end(self) -> None:
        self.process.kill()  # it has nothing to leave in order, and whoever forked it may have answers of its own to SIGTERM
        self.process.join()
        self.thread.join()
        self.pipe.close()


def _draw(draw: Callable[..., None], how: dict[str, Any]) -> str | charts.NoMatplotlib:
    try:
        return charts.svg(draw, **how)
    except charts.NoMatplotlib as missing:
        return missing


def _draw_all(pipe: Connection, others: Iterable[Connection]) -> None:
    """In a process beside: draws what it is sent until nobody is left to send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other one says what there is to say
    for other_end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other_end, signal.SIG_DFL)
    os.nice(5)  # it reads and judges first, and then it waits
    for other in others:
        other.close()
    _draw(_nothing, {"key": "warm", "title": "", "about": "", "size": (1, 1), "frame": (0, 0, 0, 0)})
    try:
        while True:
            pipe.send(_draw(*pipe.recv()))
    except (EOFError, OSError):
        return


def _nothing(axes: Any) -> None:
    axes.set_yticks([])
