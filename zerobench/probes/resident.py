"""What a process holds as others see it: the C allocator, the kernel, torch's CUDA allocator, the driver.

The ledger counts tensors. These instruments count whatever they count, so each is read raw, beside the reading of a
reference process that has the same surroundings and no subject (`reference_process`); what lies between is recorded
too. Even so levels are not judged, slopes over several sizes of model are: what does not grow with the model (a
context, code, communicators) has no slope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from zerobench.device import Device
from zerobench.nvml import NoNvml, Nvml, Tenancy
from zerobench.probes import allocator
from zerobench.readings import DevicePeak, Level, Place, Reading, Resident
from zerobench.terms import Moment

ROLLUP = Path("/proc/self/smaps_rollup")
HOST = ("malloc", "rss", "pss")
TORCH = ("requested", "allocated", "active", "reserved")
INSTRUMENTS = (*HOST, *TORCH, "nvml")


class GpuEye:
    """This process on its GPU as NVML sees it. Made before the process opens a context. why: NVML is shut."""

    def __init__(self, place: Place) -> None:
        self.tenancy: Tenancy | None = None
        self.why = "" if place.cuda else "no GPU"
        if place.cuda:
            try:
                self.tenancy = Tenancy(Nvml().find(place.uuid))
            except NoNvml as error:
                self.why = str(error)

    def nbytes(self) -> Reading:
        return self.tenancy.nbytes() if self.tenancy else Reading(None, self.why)


def readings(device: Device, eye: GpuEye) -> dict[str, Reading]:
    """Every instrument, now. What allocators keep in reserve is given back first, so that the outer ones see what the
    inner ones count."""
    device.synchronize()
    device.give_back()
    found = {"malloc": _or(allocator.in_use(), "this C library does not count what it hands out")}
    found |= host()
    memory = device.memory()
    if memory is not None:
        for name in TORCH:
            found[name] = Reading(getattr(memory, name))
        found["nvml"] = eye.nbytes()
    return found


def host(rollup: Path = ROLLUP) -> dict[str, Reading]:
    """Resident and proportional set size: all pages of the process, and those with shared ones split among sharers."""
    try:
        text = rollup.read_text()
    except OSError as error:
        return dict.fromkeys(("rss", "pss"), Reading(None, f"{rollup}: {error.strerror}"))
    kib = {name: value.split()[0] for name, _, value in (line.partition(":") for line in text.splitlines()) if value}
    return {
        name.lower(): Reading(1024 * int(kib[name])) if name in kib else Reading(None, f"{rollup} has no {name}")
        for name in ("Rss", "Pss")
    }


def _or(value: int | None, why: str) -> Reading:
    return Reading(value, "" if value is not None else why)


class Residence:
    """The probe: readings at moments, the CUDA allocator's peaks by phase. baseline: the reference process's."""

    def __init__(self, device: Device, eye: GpuEye, baseline: Mapping[str, Reading]) -> None:
        self.device, self.eye, self.baseline = device, eye, baseline
        self.residents: list[Resident] = []
        self.peaks: list[DevicePeak] = []

    def read(self, step: int, moment: Moment) -> None:
        self.residents.append(Resident(step, moment, levels(readings(self.device, self.eye), self.baseline)))

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """The allocator's peaks within it are kept."""
        self.device.reset_peaks()
        try:
            yield
        finally:
            memory = self.device.memory()
            if memory is not None:
                self.peaks.append(DevicePeak(step, name, memory))


def levels(raw: Mapping[str, Reading], baseline: Mapping[str, Reading]) -> tuple[Level, ...]:
    """Each instrument's raw reading, the baseline's, and the difference where both are there."""
    out = []
    for name, reading in raw.items():
        base = baseline.get(name, Reading(None, "no reference process"))
        both = reading.value is not None and base.value is not None
        between = reading.value - base.value if both else None  # type: ignore[operator]
        why = reading.why or ("" if base.value is not None else f"baseline: {base.why}")
        out.append(Level(name, reading.value, base.value, between, why))
    return tuple(out)
