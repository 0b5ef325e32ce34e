"""Rows: a second, correct ZeRO of stages 0 to 3, unlike the reference in every layout.

Written from the plug-in API alone, it shows that no check presumes how the reference is built. Each parameter stands
for itself (`rows_parameter.Row`): its own uneven chunks, its own reduction, its own optimizer, its own gather.
Gradients are reduced to their owners and weights broadcast by them; nothing is flattened together, nothing is padded.
"""

from __future__ import annotations

from zerobench.claims import Claims
from zerobench.implementations.protocol import Job
from zerobench.mutants.rows_engine import RowsEngine
from zerobench.mutants.rows_parameter import partition
from zerobench.terms import FEATURES, Category, Stage


class Rows:
    """Stage `stage`, built by `engine`."""

    name = "rows"
    stage = Stage.DDP
    engine: type[RowsEngine] = RowsEngine

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        """No padding, but rounding: the first rank gets the odd element of every parameter."""
        n = job.world.size
        numels = [p.numel() for p in job.module.parameters() if p.requires_grad]
        excess = sum(partition(numel, n)[0] * n for numel in numels) - sum(numels)  # of rank 0, times n
        return Claims(
            self.stage,
            supports=FEATURES - {"bucket", "simulable"},
            padding_numel=-(-excess // n) if self.stage.shards(Category.OPTIMIZER) else 0,
            prefetch_units=0,
        )

    def build(self, job: Job) -> RowsEngine:
        return self.engine(job, self.stage)


class Rows0(Rows):
    name, stage = "rows0", Stage.DDP


class Rows1(Rows):
    name, stage = "rows1", Stage.OPTIMIZER


class Rows2(Rows):
    name, stage = "rows2", Stage.GRADIENT


class Rows3(Rows):
    name, stage = "rows3", Stage.PARAMETER
