"""Chapter 4: seconds. Reported, never a gate on a shared machine."""

from __future__ import annotations

from zerobench.checks.check import SUBJECT_PHASES, Check, Judgement, NotApplicable, View
from zerobench.derived import bus_bandwidth, mfu, peak_of, tokens_per_second
from zerobench.finding import Level, Status
from zerobench.stats import median_interval
from zerobench.terms import Collective
from zerobench.units import count_text, nbytes_text, seconds_text


def slowest(times: list[tuple[float, ...]]) -> list[float]:
    """Per step the slowest rank's seconds: a step ends when the last rank ends. Raises ValueError where ranks timed
    different numbers of steps."""
    if len(times) < 2:
        return [t for each in times for t in each]
    if len(set(map(len, times))) > 1:
        raise ValueError("ranks that timed different numbers of steps")
    return list(map(max, *times))


def step_time(view: View) -> Judgement:
    """Median of bare steps, its interval, the spread between ranks, tokens a second."""
    times = [s.times_s for s in view.samples]
    if any(s.place.shared for s in view.samples):
        raise NotApplicable("ranks share a GPU: how long they take says nothing")
    if not all(times):
        raise NotApplicable("steps were not timed")
    steps = slowest(times)
    middle = sorted(steps)[len(steps) // 2]
    interval = median_interval(steps)
    spread = (max(sum(t) for t in times) - min(sum(t) for t in times)) / len(steps)
    rate = tokens_per_second(view.model.tokens, view.main.run.case.micro_batches, view.n, middle)
    used, use_text = utilisation(view, middle)
    buses = step_bus_bandwidth(view, middle)
    between = f", 95 % interval {seconds_text(interval.low)} to {seconds_text(interval.high)}" if interval else ""
    return Judgement(
        Status.PASS,
        Status.PASS,
        "",
        f"{seconds_text(middle)} a step{between} ({len(steps)} steps), ranks apart by {seconds_text(spread)}; "
        f"{count_text(round(rate))} tokens/s",
        detail=(*bus_text(buses), use_text),
        metrics=(
            ("median_s", middle),
            ("tokens_per_s", rate),
            *((f"bus_{kind.value}_bytes_per_s", found) for kind, found in buses.items()),
            *((("mfu", used),) if used is not None else ()),
        ),
    )


def step_bus_bandwidth(view: View, seconds: float) -> dict[Collective, float]:
    """Bytes a second by kind over the last watched step's own collectives, of the rank that sends most, in the seconds
    of a bare step."""
    each = [
        bus_bandwidth((c for c in s.calls if c.step == view.last_step and c.phase in SUBJECT_PHASES), seconds)
        for s in view.samples
    ]
    return max(each, key=lambda found: sum(found.values()))


def bus_text(buses: dict[Collective, float]) -> list[str]:
    """One line, or none where nothing is sent."""
    if not buses:
        return []
    kinds = ", ".join(f"{kind.value} {nbytes_text(round(found))}/s" for kind, found in buses.items())
    return [f"bus bandwidth over the whole step, a lower bound of what links carried (nccl-tests' factors): {kinds}"]


def utilisation(view: View, seconds: float) -> tuple[float | None, str]:
    """MFU where the card's peak is known, and a sentence that says of which peak, or why not."""
    place = view.samples[0].place
    if not place.cuda:
        return None, "MFU: no peak known for this device (cpu)"
    peak = peak_of(place.name, view.case.precision)
    if peak is None:
        return None, f"MFU: no dense 16-bit peak known for {place.name or place.device} in {view.case.precision}"
    tokens = view.model.tokens * view.main.run.case.micro_batches * view.n
    share = mfu(view.psi, tokens, seconds, peak, view.n)
    return share, (
        f"MFU {share:.1%} of {peak.flops / 1e12:g} TFLOP/s a card (dense 16-bit; {peak.source}), at 6 Psi FLOPs a token"
    )


CHECKS = (
    Check(
        "time.step",
        Level.INFO,
        "",
        "how long a bare step takes",
        "median over steps of the slowest rank",
        ("plain",),
        step_time,
    ),
)
