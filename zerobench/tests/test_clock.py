"""The clock against known sleeps. What waits for a device is the device layer's (test_device)."""

from __future__ import annotations

import time

import pytest

from zerobench.device import Cpu
from zerobench.probes.clock import MOST_STEPS, time_steps


def test_a_known_sleep_is_measured_and_the_barrier_is_not() -> None:
    sleeps = iter([0.02, 0.05, 0.02])
    times = time_steps(
        lambda: time.sleep(next(sleeps)), steps=3, barrier=lambda: time.sleep(0.1), seconds=Cpu().seconds
    )
    assert len(times) == 3
    late = [seconds - slept for seconds, slept in zip(times, (0.02, 0.05, 0.02), strict=True)]
    assert min(late) >= 0, "a sleep is never short"
    assert min(late) < 0.08, "the barrier's 0.1 s is outside"


def test_short_steps_are_timed_until_they_have_taken_a_while_and_as_often_on_every_rank() -> None:
    """Seconds by decree: 3 steps of 10 ms, and 0.5 s are due. One rank would need 47 more, the slowest of all says 60."""
    asked: list[float] = []

    def greatest(mine: float) -> float:
        asked.append(mine)
        return 60.0

    def take(least_s: float, slow: float = 0.01) -> int:
        return len(time_steps(bool, 3, least_s, barrier=bool, seconds=lambda _: slow, greatest=greatest))  # type: ignore

    assert take(0.5) == 63 and asked == [pytest.approx(47)]
    assert take(0.0) == 3 and len(asked) == 1
    everyone = time_steps(bool, 3, 0.5, barrier=bool, seconds=lambda _: 1.0)  # type: ignore
    assert len(everyone) == 3  # long enough already
    quick = time_steps(bool, 3, 0.5, barrier=bool, seconds=lambda _: 1e-9)  # type: ignore
    assert len(quick) == MOST_STEPS
