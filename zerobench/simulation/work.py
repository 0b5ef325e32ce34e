"""What a process does that stands for one rank of a simulated world: the worker's run, without memory and peers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zerobench import worker
from zerobench.case import Run
from zerobench.rank import Outcome, RankContext
from zerobench.simulation import peers
from zerobench.simulation.control import Simulation


def work(run: Run, context: RankContext) -> Outcome:
    """Do `run` as rank context.rank of context.world_size would. Never raises for what the subject does."""
    with Simulation() as simulation:
        outcome = worker.work(run, replace(context, join=partial(peers.join, context), simulation=simulation))
    return replace(outcome, sample=replace(outcome.sample, faked=simulation.faked))
