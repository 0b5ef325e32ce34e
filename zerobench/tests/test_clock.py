"""The clock against known sleeps."""

from __future__ import annotations

import time

from zerobench.probes.clock import time_steps


def test_a_known_sleep_is_measured_and_the_barrier_is_not() -> None:
    sleeps = iter([0.02, 0.05, 0.02])
    times = time_steps(
        lambda: time.sleep(next(sleeps)), steps=3, barrier=lambda: time.sleep(0.1), synchronize=lambda: None
    )
    assert len(times) == 3
    late = [seconds - slept for seconds, slept in zip(times, (0.02, 0.05, 0.02), strict=True)]
    assert min(late) >= 0, "a sleep is never short"
    assert min(late) < 0.08, "the barrier's 0.1 s is outside"


def test_work_that_was_only_enqueued_is_waited_for() -> None:
    order: list[str] = []
    queue: list[float] = []

    def synchronize() -> None:
        order.append("synchronize")
        while queue:
            time.sleep(queue.pop())

    def step() -> None:
        order.append("step")
        queue.append(0.03)

    (seconds,) = time_steps(step, steps=1, barrier=lambda: order.append("barrier"), synchronize=synchronize)
    assert order == ["barrier", "synchronize", "step", "synchronize"]
    assert seconds >= 0.03
