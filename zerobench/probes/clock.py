"""The clock: whole bare steps, one rank's view.

Nothing watches while a step is timed: under the ledger's dispatch mode a small model's step takes several times as
long.
"""

from __future__ import annotations

from collections.abc import Callable


def time_steps(
    step: Callable[[], None],
    *,
    steps: int,
    barrier: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
) -> tuple[float, ...]:
    """Seconds that each of `steps` calls of `step` took on this rank; the slowest rank's is the step's time.

    barrier: collective, called before each step and outside its time, so that no rank starts on another's lateness.
    seconds: calls what it is given and says how long the device was busy with it (`device.Device.seconds`).
    """
    times = []
    for _ in range(steps):
        barrier()
        times.append(seconds(step))
    return tuple(times)
