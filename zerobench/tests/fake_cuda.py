"""A stand-in for `torch.cuda`: a device that works through a queue, so that reading too early reads something wrong.

It is no GPU. It has the order of events and nothing else: kernels take the time they are said to take, an event is
stamped when the queue reaches it, a block that another stream still uses when it is freed is only given up when the
allocator looks again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeCuda:
    """Times in seconds of the device's own clock, bytes of its own allocator."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.now = 0.0
        self.done_at = [0.0, 0.0]  # when the current stream and the collectives' stream will be idle
        self.log: list[str] = []
        self.used, self.peak, self.late, self.cached = 0, 0, 0, 0
        self.current = 0

    # -- what a subject does -------------------------------------------------------------------------------------------

    def enqueue(self, seconds: float, stream: int = 0) -> None:
        self.done_at[stream] = max(self.done_at[stream], self.now) + seconds

    def allocate(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def free(self, nbytes: int, *, late: bool = False) -> None:
        """late: another stream has not done with the block."""
        if late:
            self.late += nbytes
        else:
            self.used -= nbytes
            self.cached += nbytes

    # -- torch.cuda's face ---------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def init(self) -> None:
        if not self.count:
            raise RuntimeError("Found no NVIDIA driver\nand a second line")

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name=f"Stand-in {index}", uuid=f"{index:08x}-0000", total_memory=1 << 30)

    def set_device(self, index: int) -> None:
        self.current = index

    def manual_seed_all(self, seed: int) -> None:
        self.log.append(f"seed {seed}")

    def synchronize(self, index: int) -> None:
        self.log.append("synchronize")
        self.now = max(self.now, *self.done_at)

    def Event(self, *, enable_timing: bool) -> _Event:
        assert enable_timing
        return _Event(self)

    def memory_stats(self, index: int) -> dict[str, int]:
        current = {"requested": self.used, "allocated": self.used, "active": self.used}
        stats = {f"{name}_bytes.all.current": value for name, value in current.items()}
        stats["reserved_bytes.all.current"] = self.used + self.cached
        return stats | {f"{name}_bytes.all.peak": self.peak for name in (*current, "reserved")}

    def reset_peak_memory_stats(self, index: int) -> None:
        self.log.append("reset peaks")
        self.peak = self.used

    def caching_allocator_alloc(self, nbytes: int, index: int) -> int:
        self.used -= self.late
        self.late = 0
        self.allocate(nbytes)
        return nbytes

    def caching_allocator_delete(self, pointer: int) -> None:
        self.used -= pointer

    def empty_cache(self) -> None:
        self.cached = 0


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.stamp: float | None = None

    def record(self) -> None:
        """On the current stream: it is stamped when that stream gets there, whatever the other one does."""
        self.stamp = max(self._cuda.now, self._cuda.done_at[0])

    def synchronize(self) -> None:
        assert self.stamp is not None
        self._cuda.now = max(self._cuda.now, self.stamp)

    def elapsed_time(self, end: _Event) -> float:
        if self.stamp is None or end.stamp is None or end.stamp > self._cuda.now:
            raise RuntimeError("an event has not been reached yet")
        return (end.stamp - self.stamp) * 1e3
