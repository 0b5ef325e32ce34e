"""Stage 2 with a branch on the gradient's value: nobody can know in a simulation which way it goes."""

from __future__ import annotations

from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero, Zero2
from zerobench.terms import Stage


class Peeking(Zero):
    """Skips a step whose first gradient element is negative."""

    def step(self) -> StepReport:
        if self.buckets[0].reduced[0].item() < 0:
            return StepReport(skipped=True)
        return super().step()


class Peeks(Zero2):
    name = "peeks"

    def build(self, job: Job) -> Peeking:
        return Peeking(job, Stage.GRADIENT)
