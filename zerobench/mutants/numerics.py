"""Mutants that compute something else."""

from __future__ import annotations

import torch
from torch import Tensor

from zerobench.implementations.buckets import Bucket
from zerobench.implementations.collectives import Done
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Stage


class SumsInsteadOfMean(Planted):
    name = "sums-instead-of-mean"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            for bucket in self.buckets:
                bucket.n = 1  # what each rank's share is divided by


class ForgetsOneBucket(Planted):
    name = "forgets-one-bucket"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            if bucket is not self.buckets[-1]:
                return super()._reduce(bucket)
            into = torch.empty_like(bucket.reduced) if bucket.partial else bucket.reduced
            into.copy_(bucket.gradient[bucket.mine] * self.n)
            self._in_flight.append((Done(), bucket, into))
            return None


class DropsEarlyMicroBatches(Planted):
    name, stage = "drops-early-micro-batches", Stage.OPTIMIZER

    class engine(Zero):
        def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
            if last:
                for bucket in self.buckets:
                    bucket.blank = set(bucket.slots)
            return super().forward(batch, last=last)


class StaleGather(Planted):
    name, stage = "stale-gather", Stage.OPTIMIZER

    class engine(Zero):
        steps = 0

        def step(self) -> StepReport:
            self.steps += 1
            before = [bucket.weight.clone() for bucket in self.buckets]
            report = super().step()
            if self.steps % 2:
                for bucket, old in zip(self.buckets, before, strict=True):
                    own = bucket.kept.clone()
                    bucket.weight.copy_(old)
                    bucket.kept.copy_(own)
            return report


class StepCountOff(Planted):
    name = "step-count-off"

    class engine(Zero):
        def step(self) -> StepReport:
            report = super().step()
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] += 1
            return report


class NoMaster(Planted):
    name = "no-master"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            for bucket in self.buckets:
                bucket.master = bucket.kept
            self._build_optimizer(job.param_groups())

        def _update(self, bucket: Bucket) -> None:
            for view, where in self.runs[bucket]:
                view.grad = bucket.reduced[where]
            self.optimizer.step()
            for view, _ in self.runs[bucket]:
                view.grad = None
