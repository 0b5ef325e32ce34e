"""A subject that can be made slower by a known amount of real work: it computes a unit's forward `repeats` times more.

Options: repeats; every (default 1): only in every so many steps, so that one launch has steps with and without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobench.implementations.protocol import Job
from zerobench.implementations.reference import Reference, Zero
from zerobench.terms import Stage


class RepeatingEngine(Zero):
    """The reference's DDP, and the forward of the first unit again, on the input that it had."""

    def __init__(self, job: Job, stage: Stage) -> None:
        super().__init__(job, stage)
        self.repeats, self.every = int(job.options.get("repeats", 0)), int(job.options.get("every", 1))
        self.unit, self.steps = job.units[0], 0
        self._inputs: tuple[Any, ...] = ()

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        if not self._inputs:
            with self.unit.register_forward_pre_hook(self._keep):
                loss = super().forward(batch, last=last)
        else:
            loss = super().forward(batch, last=last)
        if self.steps % self.every == 0:
            with torch.no_grad():
                for _ in range(self.repeats):
                    self.unit(*self._inputs)
        self.steps += last
        return loss

    def _keep(self, module: object, inputs: tuple[Any, ...]) -> None:
        self._inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)


class Repeating(Reference):
    name, stage = "repeating", Stage.DDP

    def build(self, job: Job) -> RepeatingEngine:
        return RepeatingEngine(job, self.stage)
