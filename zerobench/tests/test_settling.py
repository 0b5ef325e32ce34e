"""What a backend still holds after a collective is waited for, as long as it may let go, and only where a count is read."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.probes.ledger import Ledger
from zerobench.probes.storages import LONGEST_SETTLE_S, SETTLE_S
from zerobench.session import Session
from zerobench.tests.test_ledger import KB, ledger

__all__ = ["ledger"]  # a fixture of all that is here


def test_only_before_a_count_that_would_be_the_peak_is_a_backend_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, waits = ledger._books, []
    with ledger.phase(0, "step"):
        torch.zeros(10 * KB)
        monkeypatch.setattr(books, "settle", lambda: waits.append("waited"))
        torch.zeros(KB)
        assert waits == []
        torch.zeros(11 * KB)
        assert waits == ["waited"]
    assert ledger.peaks[-1].nbytes == 44 * KB


def test_what_the_suite_asks_the_ranks_is_not_counted_while_a_backend_holds_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, op: held.append(value))
    session = SimpleNamespace(ledger=ledger, job=SimpleNamespace(world=SimpleNamespace(device="cpu")))
    assert Session._greatest(session, 3) == 3.0  # type: ignore[arg-type]
    assert held[0].nbytes == 8
    assert ledger.live() == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no word on threads")
def test_a_backend_that_is_ready_to_let_go_gets_the_time_and_one_that_sleeps_does_not(ledger: Ledger) -> None:
    busy, sleeps = [torch.zeros(KB)], [torch.zeros(KB)]
    started, done = threading.Event(), threading.Event()

    def backend() -> None:
        started.set()
        until = time.perf_counter() + 12 * SETTLE_S
        while time.perf_counter() < until:
            hashlib.sha256(bytes(2**20)).digest()  # without the interpreter's lock
        busy.clear()
        done.wait()

    ledger._books.handed([*busy, *sleeps])
    ledger._books.waited()
    thread = threading.Thread(target=backend)
    thread.start()
    started.wait()
    try:
        assert ledger.live() == 4 * KB, "what is let go at last is gone, what is kept is the subject's"
        ledger._books.waited()
        begin = time.perf_counter()
        assert ledger.live() == 4 * KB
        assert time.perf_counter() - begin < LONGEST_SETTLE_S
    finally:
        done.set()
        thread.join()
