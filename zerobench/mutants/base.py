"""How a mutant is planted: the reference at some stage, claimed as it would be, with an engine that has one fault."""

from __future__ import annotations

from dataclasses import replace

from zerobench.claims import Claims
from zerobench.implementations.protocol import Job
from zerobench.implementations.reference import Reference, Zero
from zerobench.terms import Stage


class Planted(Reference):
    """built: the stage of the engine; stage: the one that is claimed; engine: the faulty class."""

    name = "planted"
    stage = Stage.GRADIENT
    built: Stage | None = None
    engine: type[Zero] = Zero

    def claims(self, job: Job) -> Claims:
        honest = type("Honest", (Reference,), {"stage": self.built if self.built is not None else self.stage})()
        claims: Claims = honest.claims(job)
        return replace(claims, stage=self.stage)

    def build(self, job: Job) -> Zero:
        return self.engine(job, self.built if self.built is not None else self.stage)
