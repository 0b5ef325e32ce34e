"""The clock: whole bare steps by wall time, one rank's view.

Nothing watches while a step is timed: under the ledger's dispatch mode a small model's step takes several times as
long.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def time_steps(
    step: Callable[[], None], *, steps: int, barrier: Callable[[], object], synchronize: Callable[[], object]
) -> tuple[float, ...]:
    """Seconds that each of `steps` calls of `step` took on this rank; the slowest rank's is the step's time.

    barrier: collective, called before each step and outside its time, so that no rank starts on another's lateness.
    synchronize: waits until the device has done what was enqueued (`torch.cuda.synchronize`; on a CPU, nothing). It is
    called before the clock starts and before it stops: a CUDA step that was only enqueued has not been taken.
    """
    times = []
    for _ in range(steps):
        barrier()
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return tuple(times)
