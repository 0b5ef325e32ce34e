"""Where a rank ran, and what its device and its system said: readings that a record keeps as they came.

A reading that could not be taken is None with the reason, never a zero: "the counter did not move" and "there is no
counter" are different findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerobench.terms import Moment

SHARED_GPU = "shared-gpu"
DEVICES = ("cpu", "cuda", SHARED_GPU)
"""What a case may ask for: the CPU; a GPU for each rank; or GPUs that ranks share where there are fewer than ranks."""


@dataclass(frozen=True)
class Place:
    """Where one rank ran.

    device: torch's name, "cpu" or "cuda:0". backend: of its collectives. label: "cpu", "gpu" (this rank's alone), or
    "shared-gpu" (other ranks' too: its times and its device-wide counters say nothing). name, uuid: the GPU's.
    host: the machine, in a job of several processes; "" for the one that wrote the record.
    """

    device: str = "cpu"
    backend: str = "gloo"
    label: str = "cpu"
    name: str = ""
    uuid: str = ""
    host: str = ""

    @property
    def shared(self) -> bool:
        return self.label == SHARED_GPU

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


CPU = Place()


@dataclass(frozen=True)
class Memory:
    """Bytes in torch's CUDA caching allocator: what was asked for; that rounded up to blocks; blocks in use or held for
    another stream; segments taken from the device. peak_*: the most since the peaks were last reset."""

    requested: int
    allocated: int
    active: int
    reserved: int
    peak_requested: int
    peak_allocated: int
    peak_active: int
    peak_reserved: int


@dataclass(frozen=True)
class Reading:
    """One number, or None and why there is none."""

    value: int | None
    why: str = ""


@dataclass(frozen=True)
class Level:
    """One instrument's bytes: raw, those of the reference process (the same surroundings without the subject), and what
    is between them. why: for what is None, the reason; beside a number, how it was taken."""

    instrument: str
    raw: int | None
    baseline: int | None = None
    difference: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Resident:
    """What a process holds at one moment of one step, by instrument, each a witness of its own.

    malloc, rss, pss: host bytes. requested, allocated, active, reserved: torch's CUDA allocator. nvml: the driver's, of
    this process or of a device that nobody else uses. Read after the allocator's cache was given back.
    """

    step: int
    moment: Moment
    levels: tuple[Level, ...]

    def level(self, instrument: str) -> Level | None:
        return next((level for level in self.levels if level.instrument == instrument), None)


@dataclass(frozen=True)
class DevicePeak:
    """The allocator at the end of one phase of a step, peaks counted from its beginning."""

    step: int
    phase: str
    memory: Memory


@dataclass(frozen=True)
class Links:
    """What the counters of this rank's GPU moved by over `steps` steps, in bytes; all processes' that use the GPU.

    why: by name, for what is None. uncertain: names of 32-bit byte counters, which may have gone round more than once.
    settings: the NCCL settings under which the steps ran.
    """

    steps: int
    nvlink_sent: int | None = None
    nvlink_received: int | None = None
    pcie_sent: int | None = None
    pcie_received: int | None = None
    links: int = 0  # NVLinks that were read
    why: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
