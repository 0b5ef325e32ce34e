"""Chapter 4: seconds. Reported, never a gate on a shared machine."""

from __future__ import annotations

from zerobench.checks.check import Check, Judgement, NotApplicable, View
from zerobench.finding import Level, Status
from zerobench.stats import median_interval
from zerobench.units import count_text, seconds_text


def slowest(times: list[tuple[float, ...]]) -> list[float]:
    """Per step the slowest rank's seconds: a step ends when the last rank ends."""
    return [max(each) for each in zip(*times, strict=True)]


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
    tokens = view.model.tokens * view.main.run.case.micro_batches * view.n
    between = f", 95 % interval {seconds_text(interval.low)} to {seconds_text(interval.high)}" if interval else ""
    return Judgement(
        Status.PASS,
        Status.PASS,
        "",
        f"{seconds_text(middle)} a step{between} ({len(steps)} steps), ranks apart by {seconds_text(spread)}; "
        f"{count_text(round(tokens / middle))} tokens/s",
        metrics=(("median_s", middle),),
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
