"""A run of which one step is followed event by event, on one rank: what `--trace` launches beside the judged run.

It is a launch of its own, so that a run's records are the same whether it was traced or not. Each rank leaves
rank<k>.json in the folder that the environment variable names; `report.trace` makes one file of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from zerobench.case import Run
from zerobench.rank import Outcome, RankContext
from zerobench.trace_folder import TRACE_FOLDER
from zerobench.worker import work as do


def work(run: Run, context: RankContext) -> Outcome:
    """Do `run` on this rank, following its last watched step. Raises KeyError without the environment variable."""
    return do(run, context, trace=Path(os.environ[TRACE_FOLDER], f"rank{context.rank}.json"))
