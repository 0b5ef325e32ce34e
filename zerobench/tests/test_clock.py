"""The clock against known sleeps. What waits for a device is the device layer's (test_device)."""

from __future__ import annotations

import time

from zerobench.device import Cpu
from zerobench.probes.clock import time_steps


def test_a_known_sleep_is_measured_and_the_barrier_is_not() -> None:
    sleeps = iter([0.02, 0.05, 0.02])
    times = time_steps(
        lambda: time.sleep(next(sleeps)), steps=3, barrier=lambda: time.sleep(0.1), seconds=Cpu().seconds
    )
    assert len(times) == 3
    late = [seconds - slept for seconds, slept in zip(times, (0.02, 0.05, 0.02), strict=True)]
    assert min(late) >= 0, "a sleep is never short"
    assert min(late) < 0.08, "the barrier's 0.1 s is outside"
