"""Mutants that hold too much for a while, in another dtype, or where torch does not look."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerobench.claims import Claims
from zerobench.implementations.buckets import Bucket, allocated, free
from zerobench.implementations.collectives import all_gather
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Category, Stage

States = dict[Category, list[Tensor]]


class Fp32MainGradients(Planted):
    name = "fp32-main-gradients"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.main = [torch.zeros(b.reduced.numel()) for b in self.buckets]

        def model_states(self) -> States:
            return super().model_states() | {Category.GRADIENT: self.main}


class WholeCastsInStep(Planted):
    name = "whole-casts-in-step"

    class engine(Zero):
        def step(self) -> StepReport:
            casts = [torch.zeros(3, bucket.padded) for bucket in self.buckets]  # three whole fp32 tensors
            report = super().step()
            del casts
            return report


class NeverResharded(Planted):
    name, stage = "never-resharded", Stage.PARAMETER

    class engine(Zero):
        def _passed(self, buckets: Any, output: Any) -> None:
            return None


class InputsKeptUntilTheEnd(Planted):
    name = "inputs-kept-until-the-end"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            self.inputs = [*getattr(self, "inputs", []), bucket.gradient.clone()]
            super()._reduce(bucket)

        def backward(self, loss: Tensor, *, last: bool) -> None:
            super().backward(loss, last=last)
            self.inputs = []


class BuffersAfterASkip(Planted):
    name = "buffers-after-a-skip"

    class engine(Zero):
        def step(self) -> StepReport:
            report = super().step()
            if report.skipped:
                self.left = [torch.zeros(bucket.padded) for bucket in self.buckets]
            return report


class RemembersEvaluations(Planted):
    name = "remembers-evaluations"

    class engine(Zero):
        def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
            loss = super().forward(batch, last=last)
            if not torch.is_grad_enabled():
                self.seen = [*getattr(self, "seen", []), loss]
            return loss


class HiddenOutsideTorch(Planted):
    name = "hidden-outside-torch"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.hidden = [bytearray(4 * bucket.padded) for bucket in self.buckets]


class BufferCalledPadding(Planted):
    name = "buffer-called-padding"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            numel = sum(bucket.padded for bucket in self.buckets) // 4
            self.spare = torch.zeros(numel, dtype=job.dtype)

        def model_states(self) -> States:
            states = super().model_states()
            return states | {Category.GRADIENT: [*states[Category.GRADIENT], self.spare]}

    def claims(self, job: Job) -> Claims:
        from dataclasses import replace

        psi = sum(p.numel() for p in job.module.parameters())
        return replace(super().claims(job), padding_numel=psi // 4)


class GathersForRecomputation(Planted):
    name, stage = "gathers-for-recomputation", Stage.PARAMETER

    class engine(Zero):
        def _gather(self, buckets: Any) -> None:
            for bucket in buckets:
                if self._in_backward and allocated(bucket.weight):
                    all_gather(bucket.weight, bucket.kept, self.n).wait()
            super()._gather(buckets)


class UpdatesEverything(Planted):
    name, stage = "updates-everything", Stage.OPTIMIZER

    class engine(Zero):
        def step(self) -> StepReport:
            whole = torch.nn.Parameter(torch.zeros(sum(bucket.padded for bucket in self.buckets)))
            whole.grad = torch.zeros_like(whole)
            torch.optim.AdamW([whole]).step()
            return super().step()


class FreesNothing(Planted):
    """Gradient buckets of stage 2 that are allocated anew every step, and never given back."""

    name = "frees-nothing"

    class engine(Zero):
        def _settle(self) -> None:
            _, bucket, _ = self._in_flight[0]
            self.old = [*getattr(self, "old", []), bucket.gradient.clone()]
            super()._settle()
            free(bucket.gradient)
