"""Mutants that send too much, in another way than they say, or where nobody looks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.implementations.buckets import Bucket
from zerobench.implementations.collectives import all_gather
from zerobench.implementations.protocol import StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Stage


class _Reduced:
    """A finished reduction whose part is still to be cut out."""

    def __init__(self, part: Tensor, whole: Tensor, mine: slice) -> None:
        self.part, self.whole, self.mine = part, whole, mine
        self.work = dist.all_reduce(whole, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.part.copy_(self.whole[self.mine])


class AllReduceInstead(Planted):
    name = "all-reduce-instead"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            into = torch.empty_like(bucket.reduced) if bucket.partial else bucket.reduced
            self._in_flight.append((_Reduced(into, bucket.gradient, bucket.mine), bucket, into))


class GathersTwice(Planted):
    name, stage = "gathers-twice", Stage.OPTIMIZER

    class engine(Zero):
        def step(self) -> StepReport:
            report = super().step()
            for bucket in self.buckets:
                all_gather(bucket.weight, bucket.kept, self.n).wait()
            return report


class ReducesEveryMicroBatch(Planted):
    name, stage, built = "reduces-every-micro-batch", Stage.OPTIMIZER, Stage.GRADIENT


class RankDependentDtype(Planted):
    name = "rank-dependent-dtype"

    class engine(Zero):
        def step(self) -> StepReport:
            odd = dist.get_rank() % 2
            dist.all_reduce(torch.zeros(128, dtype=torch.bfloat16) if odd else torch.zeros(64))
            return super().step()


class TrafficOutsideTheLog(Planted):
    name = "traffic-outside-the-log"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            group = dist.distributed_c10d._get_default_group()
            backend: Any = group._get_backend(torch.device("cpu"))
            backend.allreduce([bucket.gradient.clone()]).wait()
            super()._reduce(bucket)
