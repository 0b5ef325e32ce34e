"""More mutants of `rows`: averages, overflow, weights that do not move, bytes that travel or stay once too often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.implementations.protocol import Job, StepReport
from zerobench.mutants.planted_rows import Planted
from zerobench.mutants.rows_engine import RowsEngine
from zerobench.mutants.rows_parameter import Row
from zerobench.mutants.rows_unit import Unit
from zerobench.terms import Stage


class AveragedTwice(Planted):
    name = "averaged-twice"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            self.divisor = self.n * self.n
            return super().reduce()


class NeverZeroed(Planted):
    """What a step has used is added to the next one's gradient."""

    name, stage = "never-zeroed", Stage.OPTIMIZER

    class row(Row):
        def clear(self) -> None:
            self.gradient = None


class UnusedDrifts(Planted):
    """A parameter that no loss uses is moved all the same, by whoever owns a part of it."""

    name = "unused-drifts"

    class row(Row):
        idle = False

        def reduce(self) -> list[dist.Work]:
            self.idle = self.parameter.grad is None
            return super().reduce()

        def update(self, scale: float, coefficient: Tensor | None) -> None:
            super().update(scale, coefficient)
            if self.idle:
                self.master.add_(0.125)
                self.chunk.copy_(self.master)


class ScaleStuck(Planted):
    name = "scale-stuck"

    class engine(RowsEngine):
        def step(self) -> StepReport:
            before = self.scale
            report = super().step()
            self.scale = before
            return report


class SecondGradientCopy(Planted):
    name, stage = "second-gradient-copy", Stage.OPTIMIZER

    class row(Row):
        def reduced(self) -> None:
            super().reduced()
            assert self.parameter.grad is not None
            self.copy = self.parameter.grad.clone()


class BothReductions(Planted):
    name = "both-reductions"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            if self.parameter.grad is not None and self.n > 1:
                dist.all_reduce(self.parameter.grad.clone())
            return super().reduce()


class OneStepBehind(Planted):
    """The update uses the gradient of the step before."""

    name = "one-step-behind"

    class row(Row):
        before: Tensor | None = None

        def update(self, scale: float, coefficient: Tensor | None) -> None:
            assert self.gradient is not None
            now = self.gradient.clone()
            if self.before is not None:
                self.gradient.copy_(self.before)
            self.before = now
            super().update(scale, coefficient)


class NeverUpdates(Planted):
    """The optimizer holds tensors that the module no longer reads."""

    name = "never-updates"

    class row(Row):
        def update(self, scale: float, coefficient: Tensor | None) -> None:
            kept = self.master.clone()
            super().update(scale, coefficient)
            self.master.copy_(kept)
            self.chunk.copy_(kept)


class LocalNormReported(Planted):
    """Clips by the global norm, reports the local one."""

    name = "local-norm-reported"

    class engine(RowsEngine):
        def step(self) -> StepReport:
            local = torch.stack([self._square(row) for row in self.trained]).sum().sqrt()
            report = super().step()
            return StepReport(report.skipped, float(local), report.loss_scale)


class RatesShift(Planted):
    """A scheduler that lost count of the groups gives each parameter the rate of the next."""

    name = "rates-shift"

    class engine(RowsEngine):
        def set_lr_factor(self, factor: float) -> None:
            rates = [row.rate for row in self.trained]
            for row, rate in zip(self.trained, [*rates[1:], rates[0]], strict=True):
                row.set_lr_factor(factor * rate / row.rate)


class LosesTheOddEnd(Planted):
    """Where a parameter is not divisible by n, its last element is not brought back."""

    name = "loses-the-odd-end"

    class engine(RowsEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            for row in self.trained:
                if row.parameter.numel() % self.n and row.place == len(row.sizes) - 1 and row.master.numel():
                    row.master[-1:].zero_()


class TravelsInAnotherSixteen(Planted):
    """bf16 gradients are sent as fp16."""

    name = "travels-in-another-sixteen"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            if self.parameter.grad is None or self.n == 1:
                return super().reduce()
            wire = self.parameter.grad.view(-1).div(self.divisor).half()
            for owner, part in enumerate(torch.split(wire, self.sizes)):
                if part.numel():
                    dist.reduce(part, dst=owner)
            self.parameter.grad.view(-1).copy_(wire)
            return []


class GathersAllAtOnce(Planted):
    """Stage 3 wrapped at the root only: the first unit's gather brings everybody's weights."""

    name, stage = "gathers-all-at-once", Stage.PARAMETER

    class engine(RowsEngine):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            for unit in self.units:
                unit.gather = self._gather_all  # type: ignore[method-assign]
                unit.release = _keep  # type: ignore[method-assign]

        def _gather_all(self) -> None:
            for unit in self.units:
                Unit.gather(unit)

        def backward(self, loss: Tensor, *, last: bool) -> None:
            super().backward(loss, last=last)
            for unit in self.units:
                Unit.release(unit)


def _keep(*_: Any) -> None:
    """In the place of a release that never comes."""
