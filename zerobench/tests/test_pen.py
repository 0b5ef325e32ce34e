"""Charts are the same whoever draws them, and a process that draws leaves nobody waiting and nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zerobench.record import Provenance
from zerobench.report import charts
from zerobench.report.pen import Drawing, Pen
from zerobench.store import Writer
from zerobench.tests.made import CASE, record

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there a process draws")


def line(axes: Any, to: float) -> None:
    axes.plot([0, 1], [0, to])


def three(pen: Pen) -> list[Drawing]:
    how = {"title": "t", "about": "a", "size": (2, 2), "frame": charts.FRAME}
    return [pen.svg(partial(line, to=i), key=f"k{i}", **how) for i in range(3)]


def pages(drawings: list[Drawing]) -> list[str]:
    return [drawing.__html__() for drawing in drawings]


def test_processes_beside_draw_what_is_drawn_here() -> None:
    here = pages(three(Pen()))
    assert len(set(here)) == 3 and all(page.startswith("<svg") for page in here)
    for beside in (1, 2):
        with Pen(beside=beside) as pen:
            assert len(pen.helpers) == beside
            drawings = three(pen)
            assert [drawings[2].__html__(), *pages(drawings)] == [here[2], *here]
        assert all(helper.process.exitcode is not None for helper in pen.helpers)


def test_without_its_processes_a_pen_goes_on_here() -> None:
    here = pages(three(Pen()))
    with Pen(beside=2) as pen:
        before = three(pen)
        for helper in pen.helpers:
            os.kill(helper.process.pid, signal.SIGKILL)
            helper.process.join(10)
        assert pages(before) == here
        assert pages(three(pen)) == here


def test_a_process_ends_with_the_one_that_it_draws_for() -> None:
    """Killed, it has no time to say so; the fork that came later must not keep the pipe of the first one open."""
    code = "from zerobench.report.pen import Pen; p = Pen(beside=2); print(*[h.process.pid for h in p.helpers], flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate(timeout=10)
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("there", [True, False])
def test_a_report_says_nothing_of_its_helpers(tmp_path: Path, there: bool) -> None:
    """They end before matplotlib is loaded where there is nothing to read, and while they wait where there was."""
    about = Provenance("p", "0.1.0", "made", "d", "host", "2026-01-01T00:00:00+00:00", cases=(CASE.to_json(),))
    if there:
        with Writer(tmp_path / "r.jsonl") as writer:
            writer.write(about)
            writer.write(record(provenance="p"))
    command = [sys.executable, "-m", "zerobench", "report", "r.jsonl", "--html", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ("" if there else "zerobench: r.jsonl: cannot be read: No such file or directory\n")
    assert (tmp_path / "page.html").exists() is there


def test_a_missing_library_is_said_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise charts.NoMatplotlib("charts need matplotlib")

    monkeypatch.setattr(charts, "svg", missing)
    for beside in (0, 1):
        with Pen(beside=beside) as pen, pytest.raises(charts.NoMatplotlib, match="charts need matplotlib"):
            pages(three(pen))
