"""The device: all that differs between a CPU and CUDA. Nothing else asks which of them it runs on.

Every CUDA call of zerobench stands here, behind `torch.cuda` given as an argument, so that a machine without a GPU can
exercise the order of the calls with a stand-in. Two orders matter, and neither shows in the result when it is wrong:

1. A step that was only enqueued has not been taken: `seconds` waits for the device before it starts a clock and before
   it stops one.
2. A peak is a peak since the last reset: `reset_peaks` comes before the phase that it is to measure.

`python -m zerobench.device` prints what CUDA shows to a process (`accelerators.Gpus`), in JSON. It is asked in a
process of its own: one that has asked may hold a context on a card that others are to measure, and its forks cannot use
CUDA any more. For the same reason a rank is told its place, and does not look for one.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from zerobench.accelerators import hidden
from zerobench.probes import allocator
from zerobench.readings import Memory, Place


class Device(Protocol):
    """One rank's device. All calls are about it alone."""

    kind: str

    def use(self) -> None:
        """Make it this thread's device, and seed its generator."""

    def synchronize(self) -> None:
        """Return when all that was enqueued, on any stream, is done."""

    def seconds(self, step: Callable[[], object]) -> float:
        """How long one call of `step` keeps the device busy, from idle to idle."""

    def in_use(self) -> int | None:
        """Bytes that the device's own allocator has handed out: the ledger's independent witness. None: it does not
        say."""

    def memory(self) -> Memory | None:
        """The caching allocator's counts; None where there is no such allocator."""

    def reset_peaks(self) -> None:
        """Count the allocator's peaks from here on."""

    def give_back(self) -> None:
        """Return what allocators keep in reserve, so that the system's view shows what is in use."""

    def traced(self) -> AbstractContextManager[list[dict[str, Any]]]:
        """A list that holds, once the block is over, the events of what ran on the device meanwhile, as in a Chrome
        trace of torch's profiler."""


class Cpu:
    kind = "cpu"

    def use(self) -> None:
        torch.manual_seed(SEED)

    def synchronize(self) -> None:
        pass

    def seconds(self, step: Callable[[], object]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def in_use(self) -> int | None:
        return allocator.in_use()

    def memory(self) -> Memory | None:
        return None

    def reset_peaks(self) -> None:
        pass

    def give_back(self) -> None:
        gc.collect()
        allocator.trim()

    def traced(self) -> AbstractContextManager[list[dict[str, Any]]]:
        return nullcontext([])  # what runs on a CPU has no timeline of its own


class Cuda:
    """cuda, profile: the module `torch.cuda` and `torch.profiler.profile`, or stand-ins with the same calls."""

    kind = "cuda"

    def __init__(self, index: int, cuda: Any = torch.cuda, profile: Any = torch.profiler.profile) -> None:
        self.index, self._cuda, self._profile = index, cuda, profile

    def use(self) -> None:
        self._cuda.set_device(self.index)
        torch.manual_seed(SEED)
        self._cuda.manual_seed_all(SEED)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.index)

    def seconds(self, step: Callable[[], object]) -> float:
        """By two events of the device's own clock. The second is recorded after the whole device has come to rest: on
        its own it would speak of the current stream, and a collective runs on another."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        step()
        self.synchronize()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # it says milliseconds

    def in_use(self) -> int | None:
        return self.memory().requested

    def memory(self) -> Memory:
        self.synchronize()
        peaks = self._cuda.memory_stats(self.index)
        # A block that another stream still used when it was freed stays on the books until the allocator looks again,
        # which it does when it is next asked for memory. Peaks are read before that byte.
        self._cuda.caching_allocator_delete(self._cuda.caching_allocator_alloc(1, self.index))
        stats = self._cuda.memory_stats(self.index)
        return Memory(
            **{name: int(stats[f"{name}_bytes.all.current"]) for name in _COUNTS},
            **{f"peak_{name}": int(peaks[f"{name}_bytes.all.peak"]) for name in _COUNTS},
        )

    def reset_peaks(self) -> None:
        self.synchronize()
        self._cuda.reset_peak_memory_stats(self.index)

    def give_back(self) -> None:
        gc.collect()
        self.synchronize()
        self._cuda.empty_cache()
        allocator.trim()

    @contextmanager
    def traced(self) -> Iterator[list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        self.synchronize()
        with self._profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            yield events
            self.synchronize()  # what was only enqueued leaves no event
        with tempfile.TemporaryDirectory(prefix="zerobench-") as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events.extend(json.loads(path.read_bytes())["traceEvents"])


SEED = 0
_COUNTS = ("requested", "allocated", "active", "reserved")


def of(place: Place, cuda: Any = torch.cuda) -> Device:
    """The device of a rank."""
    return Cuda(int(place.device.partition(":")[2]), cuda) if place.cuda else Cpu()


def why_not(cuda: Any = torch.cuda, environ: Mapping[str, str] = os.environ) -> str:
    """Why CUDA is not available, as far as torch, the driver library and the environment tell."""
    if torch.version.cuda is None and cuda is torch.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    if why := hidden(environ):
        return why
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"CUDA cannot be initialised: {str(error).splitlines()[0]}"
    return "CUDA finds no device"


def facts(cuda: Any = torch.cuda) -> dict[str, Any]:
    """The fields of `accelerators.Gpus`."""
    available = bool(cuda.is_available())
    about = [cuda.get_device_properties(i) for i in range(cuda.device_count())] if available else []
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "why": "" if available else why_not(cuda),
        "names": [str(a.name) for a in about],
        "uuids": [str(getattr(a, "uuid", "")) for a in about],
        "nbytes": [int(a.total_memory) for a in about],
        "nccl": ".".join(map(str, cuda.nccl.version())) if available and torch.distributed.is_nccl_available() else "",
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
