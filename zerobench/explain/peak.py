"""The most that was alive inside a step: what was alive before the phase, and what the phase added."""

from __future__ import annotations

from zerobench.checks.check import View
from zerobench.checks.peaks import Part, backward_parts, gathered_part, step_parts
from zerobench.explain.rest import add_holding, around_tensors, find, how
from zerobench.explain.waterfall import Kind, Steps, Waterfall
from zerobench.record import Holding, Peak, Sample
from zerobench.terms import Category, Moment, Stage
from zerobench.units import nbytes_text

PHASES = ("forward", "backward", "step")


def at_peak(view: View) -> Waterfall | None:
    """The highest live bytes of the last step, on the rank where they are highest. None where no phase was watched."""
    tops = [(sample, peak) for sample in view.samples for peak in peaks(sample, view.last_step)]
    if not tops:
        return None
    sample, peak = max(tops, key=lambda pair: pair[1].nbytes)
    steps = Steps()
    add_peak(steps, view, sample, peak)
    steps.absent += around_tensors(view)
    return Waterfall(
        view.case.id,
        view.main.id,
        "at the peak",
        sample.rank,
        view.psi,
        view.n,
        f"bytes of live tensors inside {peak.phase} of step {view.last_step}, {how(view)} (Peak.nbytes)",
        peak.nbytes,
        steps.close(peak.nbytes),
        tuple(steps.absent),
    )


def peaks(sample: Sample, step: int) -> list[Peak]:
    """The peaks of a step's phases; of several micro-batches each has its own."""
    return [p for p in sample.peaks if p.step == step and p.phase in PHASES]


def add_peak(steps: Steps, view: View, sample: Sample, peak: Peak) -> None:
    """Rows from the paper's formula to the subject's highest live bytes within `peak.phase`."""
    before = _before(view, sample, peak)
    if before is None:
        steps.absent.append(f"what was alive before {peak.phase}: memory was not watched then")
        return
    add_holding(steps, view, sample, before)
    hidden = before.live - steps.sum  # unexplained already, and still there: no allowance of the phase may cover it
    if peak.phase != "step":
        _add_activations(steps, view, sample, peak)
    steps.add(
        "backend's temporaries", peak.backend, Kind.MEASURED, "Peak.backend: made inside a collective, by the backend"
    )
    parts = [part for part in _parts(view, before, peak.phase) if part.nbytes]
    allowed = ", ".join(f"{nbytes_text(p.nbytes)} of {p.name} ({p.words})" for p in parts)
    split = "; how much for each, no record says" if len(parts) > 1 else ""
    steps.within(
        " + ".join(p.name for p in parts),
        sum(p.nbytes for p in parts),
        peak.nbytes - hidden,
        f"Claims allow {allowed}{split}",
    )


def _before(view: View, sample: Sample, peak: Peak) -> Holding | None:
    """The last holding before the phase: BACKWARD before `step`, what rested between steps before the others."""
    if peak.phase == "step":
        return find(sample, peak.step, Moment.BACKWARD)
    return find(sample, peak.step - 1, Moment.STEPPED) or find(sample, -1, Moment.BUILT)


def _add_activations(steps: Steps, view: View, sample: Sample, peak: Peak) -> None:
    bare = max((p.nbytes for p in sample.bare_peaks if p.phase == peak.phase), default=None)
    if bare is None:
        steps.absent.append("activations: this record has no run of the bare model")
        return
    steps.add(
        "activations",
        bare,
        Kind.MEASURED,
        f"Sample.bare_peaks: the most that the same model holds over its parameters in {peak.phase}, run bare"
        + (", the casts that autocast makes included" if view.claims.compute == "autocast" else ""),
    )


def _parts(view: View, before: Holding, phase: str) -> tuple[Part, ...]:
    """What the claims allow the phase to add."""
    if phase == "step":
        return step_parts(view)
    alive = before.claimed.get(Category.GRADIENT.value, 0)
    if phase == "backward" or view.main.run.case.micro_batches > 1:
        return backward_parts(view, alive)
    return (gathered_part(view),) if view.stage is Stage.PARAMETER and view.n > 1 else ()
