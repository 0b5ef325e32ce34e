"""How much of the gradients' travelling is hidden behind backward, on a backend whose collectives the host waits for.

A gradient collective is issued at once, and its end is held back until backward has passed one more boundary between
units: whoever goes on computing meanwhile finds it done later, and it was hidden; whoever waits for it computes nothing,
backward does not come any further, and after a while it is let go: it was exposed. So the collective is, for the time
of one unit, as slow as the computing beside it, and no clock decides but where nothing moves.

Held back is the `Work` that the issuer gets, not the collective: peers are never kept waiting, and no order changes.
Where kernels run on a device's own streams, nothing on the host is to be held: there `timeline` reads the same from the
device's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.models import Model
from zerobench.probes.traffic import Tap
from zerobench.record import Call, Flight

LEAST_S = 0.1
STEPS = 5
"""A collective is let go after so many times what a whole step takes unheld, or LEAST_S if that is longer."""
MOST_IN_VAIN = 8
"""So many that nobody computed beside are enough: later ones are neither held nor counted."""


class Host:
    """Holds the gradient collectives of the last step; the one before it is only watched."""

    def __init__(self, tap: Tap, model: Model) -> None:
        self.flights: tuple[Flight, ...] | None = None
        self._tap, self._model = tap, model
        self._passed = self._expected = 0
        self._patience_s = LEAST_S
        self._works: list[_Held] = []
        self._calls: list[tuple[Call, _Held | None]] = []

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """Around each step. After the last, `flights` has what became of its gradient collectives."""
        self._passed, started = 0, time.perf_counter()
        self._model.observe(self._overtake)
        self._tap.around = self._hold if last else None
        try:
            yield
        except BaseException:
            for work in self._works:
                work.overtaken.set()  # and it ends when its peers come, who may never: who raised does not wait for them
            raise
        finally:
            self._tap.around = None
            self._model.observe(None)
        for work in self._works:
            work.land()
        self._works.clear()
        if not last:
            self._expected = self._passed
            self._patience_s = max(LEAST_S, STEPS * (time.perf_counter() - started))
        elif self._expected:
            self.flights = tuple(
                Flight(call.kind, float(call.numel), float(held is not None and held.hidden))
                for call, held in self._calls
            )

    def _overtake(self, unit: str) -> None:
        """Backward has come to the output of a unit: those above are done."""
        self._passed += 1
        for work in self._works:
            work.overtaken.set()

    def _hold(self, calls: list[Call], issue: Callable[[], Any]) -> Any:
        result = issue()
        carries = [call for call in calls if call.kind.reduces and call.phase in ("backward", "step")]
        if not carries or sum(work.in_vain for work in self._works) >= MOST_IN_VAIN:
            return result
        ahead = carries[0].phase == "backward" and self._passed < self._expected
        *tensors, work = result if isinstance(result, tuple) else (result,)
        held = _Held(dist.Work.unbox(work), tensors, self._patience_s) if ahead else None
        self._calls.extend((call, held) for call in carries)
        if held is None:
            return result
        self._works.append(held)
        return (*tensors, held.boxed()) if isinstance(result, tuple) else held.boxed()


class _Held(dist.Work):
    """A collective whose end is seen when backward has `overtaken` it, or patience has run out.

    Works of torch's are waited for from C++ as from Python, by `wait` or by the future; both are here. hidden: whether
    backward came further before it ended. in_vain: whether patience ran out.
    """

    def __init__(self, work: dist.Work, tensors: list[Any], patience_s: float) -> None:
        super().__init__()
        self.overtaken = threading.Event()
        self.hidden = self.in_vain = False
        self._work = work
        self._tensors = [t for each in tensors for t in (each if isinstance(each, (list, tuple)) else (each,))]
        devices = {t.device for t in self._tensors if t.is_cuda}  # whose streams wait with who waits for the future
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
        self._thread = threading.Thread(target=self._fly, args=(patience_s,), name="in flight", daemon=True)
        self._thread.start()

    def _fly(self, patience_s: float) -> None:
        self.hidden = self.overtaken.wait(patience_s)
        self.in_vain = not self.hidden
        try:
            self._work.wait()
        except Exception as error:  # the subject's to see, where it waits
            self._future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._future.set_result(self._tensors)

    def land(self) -> None:
        """Return when nothing of it runs any more."""
        self.overtaken.set()
        self._thread.join()

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return self._work.wait()  # once more, on this thread: what it has to be told, it is told

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._work.is_success()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors
