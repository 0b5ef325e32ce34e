"""Mutants that hold what they should not, or say that they hold what they do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobench.implementations.buckets import Bucket, Slot
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Category, Stage

States = dict[Category, list[Tensor]]


class ReplicatedMoments(Planted):
    name = "replicated-moments"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.whole = [torch.zeros(b.padded) for b in self.buckets]

        def model_states(self) -> States:
            states = super().model_states()
            return states | {Category.OPTIMIZER: states[Category.OPTIMIZER] + self.whole}


class StageZeroInDisguise(Planted):
    name, stage, built = "stage-zero-in-disguise", Stage.OPTIMIZER, Stage.DDP


class ClaimsHalf(Planted):
    name = "claims-half"

    class engine(Zero):
        def model_states(self) -> States:
            states = super().model_states()
            large = [t for t in states[Category.OPTIMIZER] if t.numel() > 1]
            return states | {Category.OPTIMIZER: large[::2]}


class ClaimsClones(Planted):
    name = "claims-clones"

    class engine(Zero):
        def model_states(self) -> States:
            return {category: [t.clone() for t in held] for category, held in super().model_states().items()}


class LeakedFullGradient(Planted):
    name = "leaked-full-gradient"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.last: dict[Bucket, Tensor] = {}

        def _reduce(self, bucket: Bucket) -> None:
            self.last[bucket] = bucket.gradient.clone()
            super()._reduce(bucket)


class ReduceAfterBackward(Planted):
    name = "reduce-after-backward"

    class engine(Zero):
        def _open(self, bucket: Bucket) -> None:
            if not bucket.gradient.untyped_storage().size():
                bucket.open()

        def _arrived(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._open(bucket)
            bucket.add(slot, parameter.grad)
            bucket.missing.add(slot)  # so that it is reduced with those that never come
            parameter.grad = None

        def _reduce(self, bucket: Bucket) -> None:
            super()._reduce(bucket)


class KeptView(Planted):
    name, stage, built = "kept-view", Stage.GRADIENT, Stage.OPTIMIZER

    class engine(Zero):
        def model_states(self) -> States:
            return super().model_states() | {Category.GRADIENT: [b.reduced for b in self.buckets]}


class LeakPerStep(Planted):
    name = "leak-per-step"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.kept: list[Any] = []

        def step(self) -> StepReport:
            report = super().step()
            self.kept.append(torch.zeros(16))
            return report
