"""What lies around tensors: from the ledger's count to the allocator's and the system's, each read by itself.

A level is what an instrument read, less what the reference process had (the same surroundings without the subject), so
that a difference of two levels is bytes with one name. Nothing is inferred across a level that was not read: its step
is named as absent, and the waterfall ends at the last one that was.
"""

from __future__ import annotations

from zerobench.checks.check import View
from zerobench.checks.memory import CLOSURE_NBYTES
from zerobench.explain.peak import add_peak, peaks
from zerobench.explain.rest import add_holding, find, how
from zerobench.explain.waterfall import Kind, Steps, Waterfall
from zerobench.readings import DevicePeak, Resident
from zerobench.record import Holding, Record, Sample
from zerobench.terms import Moment
from zerobench.units import nbytes_text

LEDGER = "Sample.allocator"
ON_CPU, ON_GPU = ("malloc", "rss"), ("requested", "allocated", "active", "reserved", "nvml")
"""Levels from the inside out."""
GROWING = ("allocated", "active", "reserved")
"""Those whose distance from the one inside may grow with the model."""
BESIDE = "the process beside the subject"
BETWEEN = {
    "malloc": (BESIDE, "what it had before the engine, imported modules included, and the suite's own tensors"),
    "rss": ("resident pages beyond the C allocator", "code, stacks, and pages that the allocator keeps free"),
    "requested": (BESIDE, "the suite's own tensors, and what was there before the engine"),
    "allocated": ("allocator rounding", "requests are rounded up to blocks of 512 bytes"),
    "active": ("blocks freed late", "freed while another stream used them"),
    "reserved": ("unused parts of segments", "what the allocator took from the driver, less the blocks in use"),
    "nvml": ("context and communicators", "what the driver counts outside torch's segments"),
}
"""What a level adds to the one inside it, and why."""


def witnessed(view: View) -> Waterfall | None:
    """What the subject's tensors cost by the C allocator's own count, on the run whose model is large enough for it.

    Of the moments after a step from step 1 on the one with the smallest gap: a backend's threads keep a collective's
    buffers for a moment. None where the allocator does not count.
    """
    rows = [
        (sample, h)
        for sample in view.samples
        for h in sample.holdings
        if h.moment is Moment.STEPPED and h.step >= 1 and sample.witnessed(h) is not None
    ]
    least: dict[int, tuple[Sample, Holding]] = {}
    for sample, h in sorted(rows, key=lambda row: abs(_gap(*row))):
        least.setdefault(sample.rank, (sample, h))
    if not least:
        return None
    sample, holding = max(least.values(), key=lambda pair: pair[0].witnessed(pair[1]) or 0)
    steps = Steps()
    add_holding(steps, view, sample, holding)
    _add_beside(steps, view, sample, holding)
    nbytes = sample.witnessed(holding) or 0
    return _waterfall(
        view,
        sample,
        "at rest",
        f"bytes that the allocator counts for the subject after step {holding.step}, {how(view)} ({LEDGER})",
        nbytes,
        steps,
    )


def resident_at_rest(view: View) -> Waterfall | None:
    """What the system sees after the last step, less the reference process: NVML on CUDA, the resident set on a CPU."""
    found = []
    for sample in view.samples:
        resident = _after(sample, view.last_step)
        holding = find(sample, view.last_step, Moment.STEPPED)
        if resident is not None and holding is not None:
            found.append(_resident(view, sample, resident, holding))
    return max(found, key=lambda w: w.total, default=None)


def _resident(view: View, sample: Sample, resident: Resident, holding: Holding) -> Waterfall:
    cuda = sample.place.cuda
    steps = Steps()
    add_holding(steps, view, sample, holding)
    _add_beside(steps, view, sample, holding)
    chain: list[str] = []
    for outer in ON_GPU if cuda else ON_CPU:
        level = resident.level(outer)
        if level is None or level.difference is None:
            why = level.why if level is not None and level.why else "it was not read"
            steps.absent.append(f"{BETWEEN[outer][0]}: {outer} says nothing: {why}")
            break
        _add_level(steps, view, sample.rank, outer, chain[-1] if chain else LEDGER)
        chain.append(outer)
    if not cuda:
        steps.absent.append("requested, allocated, reserved, NVML: not measured on a CPU run")
    base = resident.level(chain[-1]) if chain else None
    less = f"; less the reference process's {nbytes_text(base.baseline)}" if base and base.baseline is not None else ""
    nbytes = base.difference if base is not None and base.difference is not None else holding.live
    return _waterfall(
        view,
        sample,
        "at rest",
        f"bytes by {chain[-1] if chain else 'the ledger'} after step {view.last_step}, {how(view)} (Resident.levels){less}",
        nbytes,
        steps,
    )


def _add_level(steps: Steps, view: View, rank: int, outer: str, inner: str) -> None:
    """What one instrument counts beyond the one inside it. What surrounds tensors does not grow with the model, so of
    that no more is named than the size that has least of it has; the growth stays unexplained."""
    here = _difference(view.main, rank, outer, inner)
    if here is None:
        return
    name, words = BETWEEN[outer]
    why = f"Level.difference of {outer} less {LEDGER if inner == LEDGER else f'that of {inner}'}: {words}"
    if outer in GROWING:
        steps.add(name, here, Kind.MEASURED, why)
        return
    sizes = [d for r in view.records.values() if (d := _difference(r, rank, outer, inner)) is not None]
    steps.add(name, min(sizes), Kind.MEASURED, f"{why}; the least at {len(sizes)} sizes of model")
    if here > min(sizes):
        steps.leads.append(f"{nbytes_text(here - min(sizes))} more of '{name}' than at another size of model")


def _difference(record: Record, rank: int, outer: str, inner: str) -> int | None:
    """Bytes between two instruments after the last step of a record, on a rank; None where either says nothing."""
    step = record.run.case.warmup + record.run.case.measured - 1
    for sample in record.samples:
        resident = _after(sample, step)
        holding = find(sample, step, Moment.STEPPED)
        if sample.rank != rank or resident is None or holding is None:
            continue
        level, below = resident.level(outer), resident.level(inner)
        within = sample.witnessed(holding) if inner == LEDGER else below.difference if below else None
        if level is not None and level.difference is not None and within is not None:
            return level.difference - within
    return None


def _after(sample: Sample, step: int) -> Resident | None:
    return next((r for r in sample.residents if (r.step, r.moment) == (step, Moment.STEPPED)), None)


def resident_at_peak(view: View) -> Waterfall | None:
    """The CUDA allocator's highest reserved bytes within a phase. None on a CPU, whose allocator keeps no peak."""
    tops: list[tuple[Sample, DevicePeak]] = [
        (s, p) for s in view.samples for p in s.device_peaks if p.step == view.last_step
    ]
    if not tops:
        return None
    sample, device = max(tops, key=lambda pair: pair[1].memory.peak_reserved)
    memory = device.memory
    ledger = max(
        (p for p in peaks(sample, device.step) if p.phase == device.phase), key=lambda p: p.nbytes, default=None
    )
    steps = Steps()
    if ledger is not None:
        add_peak(steps, view, sample, ledger)
    _add_process(steps, view, sample)
    levels = {name: getattr(memory, f"peak_{name}") for name in ("requested", "allocated", "active", "reserved")}
    for inner, outer in zip(levels, GROWING, strict=False):
        name, why = BETWEEN[outer]
        steps.add(
            name, levels[outer] - levels[inner], Kind.MEASURED, f"Memory.peak_{outer} less Memory.peak_{inner}: {why}"
        )
    steps.absent.append("context and communicators: NVML is read at moments, not at a peak")
    return _waterfall(
        view,
        sample,
        "at the peak",
        f"bytes reserved by the CUDA allocator inside {device.phase} of step {device.step}, at most (Memory.peak_reserved)",
        memory.peak_reserved,
        steps,
    )


def _add_process(steps: Steps, view: View, sample: Sample) -> None:
    """Requested bytes that are not the subject's: what is there at rest is there at the peak."""
    resident, holding = _after(sample, view.last_step), find(sample, view.last_step, Moment.STEPPED)
    level = resident.level("requested") if resident else None
    counted = sample.witnessed(holding) if holding is not None else None
    if counted is None or level is None or level.raw is None:
        steps.absent.append(f"{BESIDE}: requested bytes were not read at rest")
        return
    steps.add(
        BESIDE,
        level.raw - counted,
        Kind.MEASURED,
        f"Level.raw of requested less {LEDGER}, at rest: batches, books, and what was there before",
    )


def _gap(sample: Sample, holding: Holding) -> int:
    return (sample.witnessed(holding) or 0) - holding.live


def _add_beside(steps: Steps, view: View, sample: Sample, holding: Holding) -> None:
    """What the C allocator counts beside tensors, as far as memory.closure allows; on CUDA nothing is allowed."""
    if sample.witnessed(holding) is None:
        steps.absent.append("what the allocator counts beside tensors: it does not count")
        return
    if any(s.place.cuda for s in view.samples):
        return
    allowed = max(CLOSURE_NBYTES, holding.live // 50)
    steps.add(
        "beside tensors, in the C allocator",
        max(0, min(_gap(sample, holding), allowed)),
        Kind.BOUND,
        f"{LEDGER} less Holding.live, of at most {nbytes_text(allowed)} (memory.closure): some 0.5 kB a tensor, "
        "and what libraries keep",
    )


def _waterfall(view: View, sample: Sample, moment: str, what: str, nbytes: int, steps: Steps) -> Waterfall:
    return Waterfall(
        view.case.id,
        view.main.id,
        moment,
        sample.rank,
        view.psi,
        view.n,
        what,
        nbytes,
        steps.close(nbytes),
        tuple(steps.absent),
        outer=True,
    )
