"""Mutants whose checkpoints bring back something else."""

from __future__ import annotations

from pathlib import Path

import torch

from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted


def saved_by(path: Path) -> int:
    """How many ranks saved: a file each."""
    return sum(1 for _ in path.iterdir())


class RoundsMasters(Planted):
    name = "rounds-masters"

    class engine(Zero):
        def load(self, path: Path) -> None:
            super().load(path)
            for bucket in self.buckets:
                bucket.master.copy_(bucket.master.bfloat16())


class ForgetsTheStepCount(Planted):
    name = "forgets-the-step-count"

    class engine(Zero):
        def load(self, path: Path) -> None:
            super().load(path)
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()


class LosesTheSecondMoment(Planted):
    name = "loses-the-second-moment"

    class engine(Zero):
        def load(self, path: Path) -> None:
            super().load(path)
            for state in list(self.optimizer.state.values())[-1:]:
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"][-4:].zero_()


class ShiftsOnReshard(Planted):
    name = "shifts-on-reshard"

    class engine(Zero):
        def load(self, path: Path) -> None:
            super().load(path)
            if saved_by(path) != self.n:
                bucket = self.buckets[0]
                bucket.master.copy_(bucket.master.roll(1))


class RefusesAnotherN(Planted):
    name = "refuses-another-n"

    class engine(Zero):
        def load(self, path: Path) -> None:
            if saved_by(path) != self.n:
                raise ValueError(f"checkpoint of {saved_by(path)} ranks, this is {self.n}")
            super().load(path)


class LoadsWeightsOnly(Planted):
    """The 16-bit weights are loaded, the masters are the ones from before: the first step undoes the load."""

    name = "loads-weights-only"

    class engine(Zero):
        def load(self, path: Path) -> None:
            before = [bucket.master.clone() for bucket in self.buckets]
            super().load(path)
            for bucket, old in zip(self.buckets, before, strict=True):
                bucket.master.copy_(old) if bucket.master is not bucket.kept else torch.Tensor()
