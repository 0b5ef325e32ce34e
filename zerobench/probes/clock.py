"""The clock: whole bare steps, one rank's view.

Nothing watches while a step is timed: under the ledger's dispatch mode a small model's step takes several times as
long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

MOST_STEPS = 1_000


def time_steps(
    step: Callable[[], None],
    steps: int,
    least_s: float = 0.0,
    *,
    barrier: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
    greatest: Callable[[float], float] = float,
) -> tuple[float, ...]:
    """Seconds that each of `steps` calls of `step` took on this rank, and of as many more as it takes until all of them
    have taken some `least_s` seconds, MOST_STEPS at most; the slowest rank's time is the step's.

    barrier: collective, called before each step and outside its time, so that no rank starts on another's lateness.
    seconds: calls what it is given and says how long the device was busy with it (`device.Device.seconds`). greatest:
    collective, of the ranks' values, so that all take as many steps.
    """
    times: list[float] = []

    def take(count: int) -> None:
        for _ in range(count):
            barrier()
            times.append(seconds(step))

    take(steps)
    if least_s:
        take(min(max(0, math.ceil(greatest((least_s - sum(times)) / median(times)))), MOST_STEPS - steps))
    return tuple(times)
