"""Mutants of `rows`: faults of a layout in which every parameter stands for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobench.claims import ParamGroup
from zerobench.implementations.protocol import Job, StepReport
from zerobench.mutants.rows import Rows
from zerobench.mutants.rows_engine import RowsEngine
from zerobench.mutants.rows_parameter import Row
from zerobench.terms import Stage


class Planted(Rows):
    """stage: what is built and claimed. engine: an engine with a fault; row: a parameter with one."""

    name, stage = "planted-rows", Stage.GRADIENT
    row: type[Row] = Row

    def build(self, job: Job) -> RowsEngine:
        faulty = type("Faulty", (self.engine,), {"row": self.row})
        engine: RowsEngine = faulty(job, self.stage)
        return engine


# -- the mean ----------------------------------------------------------------------------------------------------------


class DividesByAnotherGroup(Planted):
    name = "divides-by-another-group"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            self.divisor = 2 * self.n
            return super().reduce()


class DividesByATwice(Planted):
    name = "divides-by-a-twice"

    class engine(RowsEngine):
        def backward(self, loss: Tensor, *, last: bool) -> None:
            super().backward(loss / self.job.micro_batches, last=last)


class ReducesTheFirstOnly(Planted):
    """The reduction is armed for one micro-batch, and never again."""

    name = "reduces-the-first-only"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            if self.gradient is None or self.parameter.grad is None:
                return super().reduce()
            self.parameter.grad.div_(self.divisor)
            return []


class OddElementsLeftOut(Planted):
    name, stage = "odd-elements-left-out", Stage.OPTIMIZER

    class row(Row):
        def reduced(self) -> None:
            super().reduced()
            if self.gradient is not None:
                self.gradient[self.parameter.numel() // self.n :].zero_()


class UnusedGetsGarbage(Planted):
    """What a parameter without a gradient sends is whatever stands in the buffer: here ones."""

    name = "unused-gets-garbage"

    class row(Row):
        def reduce(self) -> list[dist.Work]:
            if self.parameter.grad is None:
                self.parameter.grad = torch.ones_like(self.parameter)
            return super().reduce()


# -- norm, clipping, loss scale ----------------------------------------------------------------------------------------


class ClipsByLocalNorm(Planted):
    name = "clips-by-local-norm"

    class engine(RowsEngine):
        def _norm(self) -> Tensor:
            return torch.stack([self._square(row) for row in self.trained]).sum().sqrt()


class CountsVectorsTooOften(Planted):
    """Biases and norms are taken for replicated, and their squares summed over all ranks once more."""

    name = "counts-vectors-too-often"

    class engine(RowsEngine):
        def _square(self, row: Row) -> Tensor:
            return super()._square(row) * (self.n if len(row.shape) == 1 else 1)


class NeverClipsInSixteenBits(Planted):
    name = "never-clips-in-sixteen-bits"

    class engine(RowsEngine):
        def _coefficient(self, norm: Tensor, limit: float) -> Tensor:
            fine = self.job.dtype == torch.float32
            return super()._coefficient(norm, limit) if fine else torch.ones_like(norm)


class NeverUnscales(Planted):
    name = "never-unscales"

    class row(Row):
        def update(self, scale: float, coefficient: Tensor | None) -> None:
            super().update(1.0, coefficient)


class SkipsTooLate(Planted):
    """The optimizer has eaten the overflowed gradient when the step is called off."""

    name, stage = "skips-too-late", Stage.OPTIMIZER

    class engine(RowsEngine):
        def _overflowed(self) -> bool:
            found = super()._overflowed()
            if found:
                for row in self.trained:
                    row.update(self.scale, None)
            return found


# -- whose weight, whose rate ------------------------------------------------------------------------------------------


class TiedComesApart(Planted):
    """The second name of a tied weight becomes a copy that nobody trains."""

    name, stage = "tied-comes-apart", Stage.OPTIMIZER

    def build(self, job: Job) -> RowsEngine:
        seen: set[nn.Parameter] = set()
        for module in job.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in seen:
                    setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
                seen.add(parameter)
        return super().build(job)


class OneRateForAllGroups(Planted):
    name = "one-rate-for-all-groups"

    def build(self, job: Job) -> RowsEngine:
        return super().build(replace(job, optimizer=replace(job.optimizer, groups=None)))


class FrozenAtRateZero(Planted):
    """Frozen parameters are trained, at a learning rate of zero."""

    name, stage = "frozen-at-rate-zero", Stage.OPTIMIZER

    def build(self, job: Job) -> RowsEngine:
        frozen = {name: p for name, p in job.module.named_parameters() if not p.requires_grad}
        if not frozen:
            return super().build(job)
        for parameter in frozen.values():
            parameter.requires_grad_(True)
        still = ParamGroup(tuple(frozen), {"lr": 0.0})
        groups = (*(job.optimizer.groups or ()), still)
        return super().build(replace(job, optimizer=replace(job.optimizer, groups=groups)))


class OwnChunkFirst(Planted):
    """Each rank lines up the gathered chunks from its own on; only rank 0's order is the right one."""

    name, stage = "own-chunk-first", Stage.OPTIMIZER

    class engine(RowsEngine):
        def step(self) -> StepReport:
            report = super().step()
            for row in self.trained:
                if len(set(row.sizes)) == 1:
                    parts = torch.split(row.flat, row.sizes)
                    row.flat.copy_(torch.cat([*parts[row.place :], *parts[: row.place]]))
            return report


class OneRankOwnsAll(Planted):
    name, stage = "one-rank-owns-all", Stage.OPTIMIZER

    class row(Row):
        cut = staticmethod(lambda numel, n: [numel] + [0] * (n - 1))


class MomentsInBf16(Planted):
    name = "moments-in-bf16"

    class row(Row):
        def update(self, scale: float, coefficient: Tensor | None) -> None:
            self._moments(torch.float32)
            super().update(scale, coefficient)
            self._moments(torch.bfloat16)

        def _moments(self, dtype: torch.dtype) -> None:
            assert self.optimizer is not None
            state = self.optimizer.state.get(self.master, {})
            for key, value in state.items():
                if value.dim():
                    state[key] = value.to(dtype)


# -- checkpoints -------------------------------------------------------------------------------------------------------


class StatesByPosition(Planted):
    """Loads optimizer states in another order than parameters: where shapes agree, nothing complains."""

    name = "states-by-position"

    class engine(RowsEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            last: dict[tuple[int, ...], Row] = {}
            for row in self.trained:
                other = last.setdefault(tuple(row.sizes), row)
                mine, theirs = row.state(), other.state()
                if other is not row and row.optimizer is not None and other.optimizer is not None:
                    row.optimizer.state[row.master] = theirs
                    other.optimizer.state[other.master] = mine


class DropsMomentsOnReshard(Planted):
    name = "drops-moments-on-reshard"

    class engine(RowsEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            if len(list(path.iterdir())) != self.n:
                for row in self.trained:
                    if row.optimizer is not None:
                        row.optimizer.state.clear()


class StepCountLostOnReshard(Planted):
    name = "step-count-lost-on-reshard"

    class engine(RowsEngine):
        def load(self, path: Path) -> None:
            super().load(path)
            if len(list(path.iterdir())) != self.n:
                for row in self.trained:
                    if "step" in row.state():
                        row.state()["step"].zero_()
