"""Mutants that send more, in another dtype, alone, or late."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.implementations.buckets import Bucket, Slot
from zerobench.implementations.collectives import Done, Work, all_gather, reduce_scatter
from zerobench.implementations.protocol import StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.mutants.traffic import AllReduceInstead
from zerobench.terms import Category, Stage


class StageThreeAllReduces(Planted):
    name, stage = "stage-three-all-reduces", Stage.PARAMETER
    engine = AllReduceInstead.engine


class _Cast:
    """A reduction in fp32, whose part is rounded when it is there."""

    def __init__(self, part: Tensor, whole: Tensor, n: int) -> None:
        self.part, self.wide = part, torch.empty(part.numel())
        self.whole = whole.float()
        self.work = reduce_scatter(self.wide, self.whole, n)

    def wait(self) -> None:
        self.work.wait()
        self.part.copy_(self.wide)


class ReducesInFp32(Planted):
    name = "reduces-in-fp32"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            into = torch.empty_like(bucket.reduced) if bucket.partial else bucket.reduced
            self._in_flight.append((_Cast(into, bucket.gradient, self.n), bucket, into))


class GathersInFp32(Planted):
    name, stage = "gathers-in-fp32", Stage.OPTIMIZER

    class engine(Zero):
        def _publish(self, bucket: Bucket) -> Work:
            whole = torch.empty(bucket.padded)
            all_gather(whole, bucket.master, self.n).wait()
            bucket.weight.copy_(whole)
            return Done()


class SendsAlone(Planted):
    name, stage = "sends-alone", Stage.DDP

    class engine(Zero):
        def step(self) -> StepReport:
            for bucket in self.buckets:
                dist.all_reduce(bucket.gradient)
            return super().step()


class PaddingOfItsOwn(Planted):
    name, stage = "padding-of-its-own", Stage.OPTIMIZER

    class engine(Zero):
        def _publish(self, bucket: Bucket) -> Work:
            super()._publish(bucket).wait()
            part = torch.zeros(64, dtype=bucket.weight.dtype)
            return all_gather(torch.empty(64 * self.n, dtype=part.dtype), part, self.n)


class ReducesAtTheEnd(Planted):
    name, stage = "reduces-at-the-end", Stage.OPTIMIZER

    class engine(Zero):
        def _arrived(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
            assert parameter.grad is not None
            bucket.add(slot, parameter.grad)
            bucket.missing.add(slot)  # so that it is reduced with those that never come
            parameter.grad = None


class WaitsAtOnce(Planted):
    """It issues a reduction while backward goes on, and backward goes on when the reduction is over."""

    name = "waits-at-once"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            super()._reduce(bucket)
            self._settle()


class SilentDrift(Planted):
    """One rank's replicated weights move by an ulp: no collective ever tells."""

    name, stage = "silent-drift", Stage.OPTIMIZER

    class engine(Zero):
        def step(self) -> StepReport:
            report = super().step()
            if dist.get_rank() == 1:
                flat = self.buckets[0].weight
                flat[:1] = torch.nextafter(flat[:1].float(), torch.tensor(9.0)).to(flat.dtype) * 1.01
            return report


class NoInitialSync(Planted):
    name, stage = "no-initial-sync", Stage.OPTIMIZER

    class engine(Zero):
        def _start_alike(self) -> None:
            return None


class ForgetsToWait(Planted):
    """The next forward may start before the new weights have come."""

    name, stage = "forgets-to-wait", Stage.OPTIMIZER

    class engine(Zero):
        def _publish(self, bucket: Bucket) -> Work:
            self.late = [*getattr(self, "late", [])[-8:], super()._publish(bucket)]
            return Done()


class ReadsTooEarly(Planted):
    """Takes its part of a gradient, and frees the whole, before the reduction is over."""

    name = "reads-too-early"

    class engine(Zero):
        def _settle(self) -> None:
            work, bucket, into = self._in_flight.popleft()
            early = into.clone()
            work.wait()
            bucket.reduced.copy_(early) if not bucket.partial else bucket.reduced.add_(early)
            if self.stage.shards(Category.GRADIENT):
                bucket.partial = True
                bucket.gradient.untyped_storage().resize_(0)
