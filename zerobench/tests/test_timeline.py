"""Flights off a kernel timeline. The traces are made by hand, in the format of torch's profiler: no GPU was at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerobench.device import Cpu, Cuda
from zerobench.probes.timeline import Timeline, flights
from zerobench.record import Flight
from zerobench.terms import Collective
from zerobench.tests.fake_cuda import FakeCuda

REDUCTION = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT"


def ran(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 0, "tid": 7}


def test_a_reduction_is_hidden_as_far_as_something_else_runs() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 100.0, "id": 1},
        ran("aten::mm", 100.0, 900.0, cat="cpu_op"),  # the host's: no kernel
        ran("nccl:_reduce_scatter_base", 100.0, 900.0, cat="gpu_user_annotation"),
        ran(GEMM, 100.0, 50.0),
        ran(REDUCTION, 120.0, 40.0),
        ran("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 160.0, 100.0),  # weights
        ran("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevKernelArgsStorage<4096ul>)", 200.0, 10.0),
        ran("ncclKernel_Reduce_RING_LL_Sum_half(ncclWorkElem)", 300.0, 20.0),
        ran("Memcpy DtoD (Device -> Device)", 310.0, 4.0, cat="gpu_memcpy"),
        ran("Memset (Device)", 312.0, 4.0, cat="gpu_memset"),
    ]
    assert flights(events) == (
        Flight(Collective.REDUCE_SCATTER, 40.0, 30 / 40),  # until the product is done, at 150
        Flight(Collective.ALL_REDUCE, 10.0, 0.0),  # an all-gather beside it computes nothing
        Flight(Collective.REDUCE, 20.0, 6 / 20),  # 310 to 316, the overlap of both counted once
    )


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


@given(spans, st.integers(0, 60), st.integers(1, 20))
def test_the_hidden_share_counts_each_instant_once(computed: list[tuple[int, int]], start: int, length: int) -> None:
    (flight,) = flights([ran(REDUCTION, start, length), *(ran(GEMM, s, n) for s, n in computed)])
    instants = {i for s, n in computed for i in range(s, s + n)} & set(range(start, start + length))
    assert flight.hidden == pytest.approx(len(instants) / length)


# -- the device layer --------------------------------------------------------------------------------------------------


class Profile:
    """A stand-in for torch.profiler.profile: it knows of the kernels that the device has done when it is left."""

    def __init__(self, cuda: FakeCuda, activities: Any) -> None:
        self.cuda, self.started, self.spans = cuda, 0.0, [(0.0, 0.0)]

    def __enter__(self) -> Profile:
        self.started = self.cuda.now
        return self

    def __exit__(self, *error: object) -> None:
        self.spans = [(self.started, min(done, self.cuda.now)) for done in self.cuda.done_at]

    def export_chrome_trace(self, path: str) -> None:
        names = (GEMM, REDUCTION)
        events = [ran(n, a, b - a) for n, (a, b) in zip(names, self.spans, strict=True) if b > a]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def sees_the_step_alone(make: Callable[..., Cuda]) -> None:
    """5 s of somebody else's work, then a step of 1 s beside a reduction of 4 s: a quarter of it is hidden."""
    cuda = FakeCuda()
    cuda.enqueue(5.0)
    timeline = Timeline(make(0, cuda, partial(Profile, cuda)))
    for last in (False, True):
        with timeline.step(last=last):
            cuda.enqueue(1.0)
            cuda.enqueue(4.0, stream=1)
        if not last:
            assert timeline.flights is None, "only the last step is traced"
            cuda.synchronize(0)
    assert timeline.flights == (Flight(Collective.REDUCE_SCATTER, pytest.approx(4.0), pytest.approx(0.25)),)


class LeavesTooEarly(Cuda):
    """It leaves the profiler before what was enqueued has run."""

    def synchronize(self) -> None:
        if self._cuda.now:  # the first wait, before the profiler, is made
            return
        super().synchronize()


def test_a_traced_step_is_whole() -> None:
    sees_the_step_alone(Cuda)


def test_a_planted_misordering_is_caught() -> None:
    with pytest.raises(AssertionError):
        sees_the_step_alone(LeavesTooEarly)


def test_the_real_profiler_writes_what_is_read() -> None:
    """On a CPU it records the host's operators, none of which ran on a device."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    device = Cuda(0, FakeCuda(), lambda activities: torch.profiler.profile(activities=cpu))
    with device.traced() as events:
        torch.ones(8) + 1
    assert any(e.get("ph") == "X" and e["name"] == "aten::add" and e["dur"] >= 0 for e in events)
    assert flights(events) == ()
    with Cpu().traced() as none:
        torch.ones(8) + 1
    assert none == []
