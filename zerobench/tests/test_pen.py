"""Charts are the same whoever draws them, and a process that draws leaves nobody waiting and nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest

from zerobench.report import charts
from zerobench.report.pen import Drawing, Pen

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there a process draws")


def line(axes: Any, to: float) -> None:
    axes.plot([0, 1], [0, to])


def three(pen: Pen) -> list[Drawing]:
    how = {"title": "t", "about": "a", "size": (2, 2), "frame": charts.FRAME}
    return [pen.svg(partial(line, to=i), key=f"k{i}", **how) for i in range(3)]


def pages(drawings: list[Drawing]) -> list[str]:
    return [drawing.__html__() for drawing in drawings]


def test_a_process_beside_draws_what_is_drawn_here() -> None:
    here = pages(three(Pen()))
    assert len(set(here)) == 3 and all(page.startswith("<svg") for page in here)
    with Pen(beside=True) as pen:
        drawings = three(pen)
        assert [drawings[2].__html__(), *pages(drawings)] == [here[2], *here]
    pen.process.join(10)
    assert pen.process.exitcode == 0


@pytest.mark.parametrize("when", ["before", "between"])
def test_without_its_process_a_pen_goes_on_here(when: str) -> None:
    with Pen(beside=True) as pen:
        drawings = three(pen)
        first = pages(drawings[:1]) if when == "between" else []
        os.kill(pen.process.pid, signal.SIGKILL)
        pen.process.join(10)
        assert first + pages(drawings[len(first) :]) == pages(three(Pen()))


def test_one_without_work_ends_with_who_made_it() -> None:
    pen = Pen(beside=True)
    three(pen)
    pen.close()
    began = time.monotonic()
    pen.process.join(20)
    assert pen.process.exitcode == 0 and time.monotonic() - began < 20


def test_a_missing_library_is_said_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise charts.NoMatplotlib("charts need matplotlib")

    monkeypatch.setattr(charts, "svg", missing)
    for beside in (False, True):
        with Pen(beside=beside) as pen, pytest.raises(charts.NoMatplotlib, match="charts need matplotlib"):
            pages(three(pen))
