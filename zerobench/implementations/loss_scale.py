"""The loss scale: what a loss is multiplied by, so that 16-bit gradients do not underflow.

A static scale is a number. A dynamic one starts at job.initial_scale, is halved by a step whose gradient overflowed,
and doubled after GROWTH_STEPS steps without one (torch.amp.GradScaler's rule, with its defaults). Powers of two cancel
without a rounding. Every rank must hear the same verdict on every step, or scales part.
"""

from __future__ import annotations

from collections.abc import Mapping

GROWTH_STEPS = 2000


class LossScale:
    """value: the scale in force, or None without one: then the loss is left alone and nobody looks for overflow."""

    def __init__(self, asked: float | str | None, initial: float) -> None:
        """asked: job.loss_scale. Raises ValueError for what is neither a positive number, "dynamic" nor None."""
        if not (asked is None or asked == "dynamic" or (isinstance(asked, (int, float)) and asked > 0)):
            raise ValueError(f"loss_scale must be a positive number, 'dynamic' or None, not {asked!r}")
        self.dynamic = asked == "dynamic"
        self.value: float | None = float(initial) if self.dynamic else asked  # type: ignore[assignment]
        self._good = 0  # steps since the last change

    def update(self, overflowed: bool) -> None:
        """After a step, whose verdict was the same on all ranks."""
        if not self.dynamic:
            return
        assert self.value is not None
        self._good = 0 if overflowed else self._good + 1
        if overflowed:
            self.value /= 2
        elif self._good == GROWTH_STEPS:
            self.value *= 2
            self._good = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; empty where the job says it all."""
        return {"value": self.value, "good": self._good} if self.dynamic and self.value is not None else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`. A dynamic scale that a run without one saved starts anew; a static one is the job's."""
        if self.dynamic and state:
            self.value, self._good = state["value"], int(state["good"])
