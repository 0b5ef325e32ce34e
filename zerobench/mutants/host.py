"""Mutants whose memory is no tensor's: no tensor probe can see it, the allocator and the kernel do."""

from __future__ import annotations

from zerobench.implementations.protocol import Job
from zerobench.implementations.reference import Zero
from zerobench.mutants.base import Planted
from zerobench.terms import Stage


class ShadowOutsideTorch(Planted):
    name = "shadow-outside-torch"

    class engine(Zero):
        def __init__(self, job: Job, stage: Stage) -> None:
            super().__init__(job, stage)
            numel = sum(p.numel() for p in job.module.parameters())
            self.shadow = b"\xff" * (4 * numel)  # not zeros: pages that nobody has written are not resident
