"""Stage 2, of which the last rank keeps a copy of the weights that nobody claims."""

from __future__ import annotations

from torch import Tensor

from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.reference import Zero, Zero2
from zerobench.terms import Stage


class Hoarding(Zero):
    """watched: the parameters of which copies are kept, none on the other ranks."""

    watched: tuple[Tensor, ...] = ()
    copies: tuple[Tensor, ...] = ()

    def step(self) -> StepReport:
        report = super().step()
        self.copies = tuple(p.detach().clone() for p in self.watched)
        return report


class Hoards(Zero2):
    name = "hoards"

    def build(self, job: Job) -> Hoarding:
        engine = Hoarding(job, Stage.GRADIENT)
        if job.world.rank == job.world.size - 1:
            engine.watched = tuple(job.module.parameters())
        return engine
