"""The counters of a GPU's links before and after a block of steps: the wire's word where the wire is NVLink or PCIe.

NVLink: fields 138 and 139, KiB of data sent and received, by link (the link is the field's scope); cumulative.
PCIe: fields 197 and 198, bytes. Both count whoever uses the device. A 32-bit counter goes round, and is unwound once;
a byte counter of 32 bits goes round every 4 GB, so it is only believed where something bounds what it can have seen.
PCIe carries batches and commands as well as collectives. NVML's own PCIe throughput is a sampled rate: not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerobench.nvml import MAX_LINKS, Gpu, Tenancy
from zerobench.readings import Links

LINK_COUNT, NVLINK_SENT, NVLINK_RECEIVED, PCIE_SENT, PCIE_RECEIVED = 91, 138, 139, 197, 198  # nvml.h: NVML_FI_DEV_*
KIB = 1024
NAMES = ("nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received")


@dataclass(frozen=True)
class Count:
    """A counter's value in its own unit, and after how many bits it goes round."""

    value: int
    bits: int


@dataclass(frozen=True)
class Counts:
    """All counters of a GPU at one time. counts: by name, one a link. why: by name, for what cannot be read."""

    counts: Mapping[str, tuple[Count, ...]]
    why: Mapping[str, str]


def read(tenancy: Tenancy) -> Counts:
    """The counters now; where others use the device none is believed."""
    if others := tenancy.others():
        return Counts({}, dict.fromkeys(NAMES, others))
    counts: dict[str, tuple[Count, ...]] = {}
    why: dict[str, str] = {}
    links = _links(tenancy.gpu)
    scopes = {"nvlink_sent": links, "nvlink_received": links, "pcie_sent": (0,), "pcie_received": (0,)}
    for name, field in zip(NAMES, (NVLINK_SENT, NVLINK_RECEIVED, PCIE_SENT, PCIE_RECEIVED), strict=True):
        read_, reason = [], "" if scopes[name] else "no NVLink is up"
        for scope in scopes[name]:
            reading, bits = tenancy.gpu.field(field, scope)
            if reading.value is None:
                reason = reason or reading.why
            else:
                read_.append(Count(reading.value, bits))
        if reason:
            why[name] = reason
        else:
            counts[name] = tuple(read_)
    return Counts(counts, why)


def _links(gpu: Gpu) -> tuple[int, ...]:
    """The links that are up; their number is a field of its own, and absent on a GPU without any."""
    count = gpu.field(LINK_COUNT)[0].value
    return tuple(
        link for link in range(min(count or 0, MAX_LINKS)) if gpu.ask("nvmlDeviceGetNvLinkState", link)[0] == 1
    )


def difference(before: Counts, after: Counts, steps: int, settings: Mapping[str, str]) -> Links:
    """What `steps` steps between two readings moved, in bytes. settings: NCCL's, under which they ran."""
    moved: dict[str, int | None] = dict.fromkeys(NAMES)
    why = dict(before.why) | dict(after.why)
    for name in NAMES:
        if name in why:
            continue
        old, new = before.counts[name], after.counts[name]
        if len(old) != len(new):
            why[name] = f"{len(old)} links were up, then {len(new)}"
            continue
        unit = KIB if name.startswith("nvlink") else 1
        steps_ = [_moved(a, b) for a, b in zip(old, new, strict=True)]
        if None in steps_:
            why[name] = "a counter went backwards: the device was reset"
            continue
        moved[name] = unit * sum(s for s in steps_ if s is not None)
        if unit == 1 and any(c.bits < 64 for c in new):
            moved[name], why[name] = None, f"a byte counter of {new[0].bits} bits may go round more than once"
    links = len(after.counts.get("nvlink_sent", ()))
    return Links(steps, **moved, links=links, why=why, settings=dict(settings))  # type: ignore[arg-type]


def _moved(before: Count, after: Count) -> int | None:
    """By how much, unwound once where it went round; None where a counter that cannot go round went back."""
    if after.value >= before.value:
        return after.value - before.value
    return after.value + (1 << after.bits) - before.value if after.bits < 63 else None
