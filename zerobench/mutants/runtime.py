"""Mutants that do not come to an end, or do not leave the house as it was."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.implementations.protocol import StepReport
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted


class OneRankRaises(Planted):
    name = "one-rank-raises"

    class engine(Zero):
        backwards = 0

        def backward(self, loss: Tensor, *, last: bool) -> None:
            self.backwards += 1
            if self.backwards == 2 and dist.get_rank() == 1:
                raise IndexError("list index out of range")
            super().backward(loss, last=last)


class OneRankHangs(Planted):
    name = "one-rank-hangs"

    class engine(Zero):
        steps = 0

        def step(self) -> StepReport:
            self.steps += 1
            if self.steps == 2 and dist.get_rank() == 1:
                time.sleep(3600)
            return super().step()


class ChangesTheHouse(Planted):
    name = "changes-the-house"

    class engine(Zero):
        def close(self) -> None:
            super().close()
            torch.set_default_dtype(torch.float64)
