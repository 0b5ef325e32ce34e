"""Mutants that compute something else in the corners: micro-batches, groups, small tensors, overflow, chance."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.implementations.buckets import Bucket
from zerobench.implementations.collectives import Done
from zerobench.implementations.protocol import Job
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Stage


class SecondStepOverwrites(Planted):
    name, stage = "second-step-overwrites", Stage.OPTIMIZER

    class engine(Zero):
        def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
            if self._stepped:
                for bucket in self.buckets:
                    bucket.blank = set(bucket.slots)
            return super().forward(batch, last=last)


class LastOfTheCaller(Planted):
    """Told of one micro-batch, it takes each backward for the step's first."""

    name, stage = "last-of-the-caller", Stage.OPTIMIZER

    class engine(Zero):
        def backward(self, loss: Tensor, *, last: bool) -> None:
            if self.micro_batches == 1:
                for bucket in self.buckets:
                    bucket.blank = set(bucket.slots)
            super().backward(loss, last=last)


class DiffersWithoutOverlap(Planted):
    """Without overlap a bucket is reduced before its first parameter's gradient is in it."""

    name = "differs-without-overlap"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            if not self.overlap:
                bucket.slots[0].of(bucket.gradient).zero_()
            super()._reduce(bucket)


class ReducesAgain(Planted):
    name = "reduces-again"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            if bucket.partial:
                bucket.gradient[bucket.mine] += bucket.reduced
            super()._reduce(bucket)


class NormReducedTwice(Planted):
    name, stage = "norm-reduced-twice", Stage.DDP

    class engine(Zero):
        def _norm(self) -> Tensor:
            square = super()._norm() ** 2
            dist.all_reduce(square)
            return square.sqrt()


class ClipsUnasked(Planted):
    name = "clips-unasked"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(replace(job, clip_norm=job.clip_norm or 1.0), stage)


class OverflowAlone(Planted):
    """Each rank looks for overflow in what it computed itself, and decides alone."""

    name, stage = "overflow-alone", Stage.PARAMETER

    class engine(Zero):
        def backward(self, loss: Tensor, *, last: bool) -> None:
            self.mine = bool(loss.isfinite())
            super().backward(loss, last=last)

        def _norm(self) -> Tensor:
            return torch.tensor(1.0 if self.mine else float("inf"))


class SkipsUpdates(Planted):
    """Every third step changes nothing, and says nothing."""

    name = "skips-updates"

    class engine(Zero):
        steps = 0

        def _update(self, bucket: Bucket) -> None:
            if bucket is self.buckets[0]:
                self.steps += 1
            if self.steps % 3:
                super()._update(bucket)


class BucketSizedLeftOut(Planted):
    name = "bucket-sized-left-out"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            self.limit = job.bucket_numel

        def _reduce(self, bucket: Bucket) -> None:
            if [slot.stop - slot.start for slot in bucket.slots] != [self.limit]:
                return super()._reduce(bucket)
            bucket.reduced.copy_(bucket.gradient[bucket.mine] * self.n)
            self._in_flight.append((Done(), bucket, bucket.reduced))
            return None


class SmallGetsZero(Planted):
    name = "small-gets-zero"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            for slot in bucket.slots:
                if slot.stop - slot.start <= self.n:
                    slot.of(bucket.gradient).zero_()
            super()._reduce(bucket)


class NeverTheSame(Planted):
    """The update depends on chance, by about a rounding."""

    name = "never-the-same"

    class engine(Zero):
        def _update(self, bucket: Bucket) -> None:
            super()._update(bucket)
            noise = int.from_bytes(os.urandom(1), "little") / 255
            bucket.master.mul_(1 + 2.0**-22 * noise)


class BucketCountMatters(Planted):
    name = "bucket-count-matters"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            if len(self.buckets) > 3 and bucket is self.buckets[3]:
                bucket.gradient.mul_(2)
            super()._reduce(bucket)


class ForwardsTwice(Planted):
    """Runs every forward once more, for its shapes: a buffer that the forward updates counts double."""

    name = "forwards-twice"

    class engine(Zero):
        def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
            with torch.no_grad():
                self.module(*batch)
            return super().forward(batch, last=last)


class UnshardsTheWrongWay(Planted):
    """Stage 3 gathers parts in reverse order of ranks from the second step on."""

    name, stage = "unshards-the-wrong-way", Stage.PARAMETER

    class engine(Zero):
        def _gather(self, buckets: list[Bucket]) -> None:  # type: ignore[override]
            fresh = [b for b in buckets if not b.weight.untyped_storage().size()]
            super()._gather(buckets)
            if self._stepped:
                for bucket in fresh:
                    parts = bucket.weight.view(self.n, -1)
                    parts.copy_(parts.flip(0).clone())
