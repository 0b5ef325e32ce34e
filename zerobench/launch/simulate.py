"""Runs of worlds that are not there: a process for each chosen rank, tensors without memory, no network.

    with Simulate() as simulate:
        record = simulate.launch(case.run("plain"), deadline_s=60)

The rest is the local launcher's: processes forked for this run alone, a deadline, whatever they do in the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobench.case import Run
from zerobench.launch.local import Local
from zerobench.launch.nursery import PRELOAD
from zerobench.readings import Place
from zerobench.record import Record
from zerobench.scenarios import NOT_SIMULATED, SCENARIOS

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

WORKER = "zerobench.simulation.work:work"
WHOLE_WORLD = 4
"""Worlds of so many ranks are simulated whole; of a larger one the first and the last rank."""
PLACE = Place("cpu", "fake", "simulated")


class Simulate(Local):
    """A launcher as `Local` is one, for cases of any world size."""

    def __init__(self) -> None:
        super().__init__(preload=(*PRELOAD, "zerobench.simulation.work"))

    def launch(self, run: Run, *, deadline_s: float, suite: str = "", target: str = WORKER) -> Record:
        """See `Local.launch`. The samples are those of the ranks that ran. A scenario that needs values is a skip."""
        if not SCENARIOS[run.scenario].simulable:
            return Record(suite, run, "skip", NOT_SIMULATED)
        return super().launch(run, deadline_s=deadline_s, suite=suite, target=target)

    def _places(self, run: Run) -> dict[int, Place]:
        return dict.fromkeys(chosen_ranks(run.case.world_size), PLACE)

    def _rendezvous(self, run: Run) -> TCPStore | None:
        return None


def chosen_ranks(n: int) -> tuple[int, ...]:
    """The ranks of a world of n that a simulation is about."""
    return tuple(range(n)) if n <= WHOLE_WORLD else (0, n - 1)
