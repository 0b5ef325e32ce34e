"""How much of the gradients' travelling is hidden behind computing, read off a device's kernel timeline.

A trace of torch's profiler (Kineto, in the Chrome trace format) has one event for each kernel, copy and fill that ran
on the device, with its beginning and its length in microseconds of the device's clock. NCCL's kernels say in their
names what they do; whatever else ran is computing. The share of a collective in which something else ran is hidden.

Where a collective's kernel waits for a peer that is late, it runs and is in flight: what its own rank computes
meanwhile hides it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zerobench.device import Device
from zerobench.probes.regions import union
from zerobench.record import Flight
from zerobench.terms import Collective

_RAN = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NCCL = re.compile(r"^nccl\w*?Kernel_(?P<what>[A-Za-z]+)")
_GRADIENTS = {
    "AllReduce": Collective.ALL_REDUCE,
    "ReduceScatter": Collective.REDUCE_SCATTER,
    "Reduce": Collective.REDUCE,
}

Span = tuple[float, float]


class Timeline:
    """Reads the last step's flights off the device's timeline."""

    def __init__(self, device: Device) -> None:
        self.flights: tuple[Flight, ...] | None = None
        self._device = device

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """Around each step; only the last is traced."""
        if not last:
            yield
            return
        with self._device.traced() as events:
            yield
        self.flights = flights(events)


def flights(events: Iterable[Mapping[str, Any]]) -> tuple[Flight, ...]:
    """One Flight for each kernel of a reduction, weighed by its microseconds.

    events: `traceEvents` of a trace of one step on one device; all but complete events ("X") of what ran on the device
    are left out.
    """
    sent: list[tuple[Collective, Span]] = []
    computed: list[Span] = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in _RAN:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        named = _NCCL.match(str(event.get("name", "")))
        if named is None:
            computed.append(span)
        elif kind := _GRADIENTS.get(named["what"]):
            sent.append((kind, span))
    busy = union(computed)
    return tuple(Flight(kind, end - start, _share((start, end), busy)) for kind, (start, end) in sent)


def _share(span: Span, busy: list[Span]) -> float:
    """How much of `span` lies within `busy`, 0 to 1; 0 for a span of no length."""
    start, end = span
    within = sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
    return within / (end - start) if end > start else 0.0
