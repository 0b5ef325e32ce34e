"""How much of a step is collectives, and how much of that is gloo's way to reduce-scatter?

    python -m zerobench.tests.benchmarks.wire_share results/ab-....jsonl

Takes the collectives of one step from the records of a comparison and times them bare: the same kinds and sizes in the
same order on fresh ranks, each waited for, nothing computed. gloo sends a reduce-scatter as an all-reduce, twice the
bytes of a ring. An all-gather of the same size sends as many bytes as a reduce-scatter should, so the time of the
reduce-scatters less that of as many such all-gathers is the backend's excess. (A real reduce-scatter adds numbers as
well, so the excess is rather too high.) A step overlaps collectives with its computing: shares of it are at most these.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zerobench.ab import suite_of
from zerobench.case import Case, Run
from zerobench.checks.pairs import SIDES, step_times
from zerobench.checks.timing import slowest
from zerobench.launch.local import Local
from zerobench.rank import Outcome, RankContext
from zerobench.record import Record, Sample
from zerobench.report.text import table
from zerobench.stats import median
from zerobench.store import read
from zerobench.terms import Collective

TARGET = "zerobench.tests.benchmarks.wire_share:replay"
PAYLOAD = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
STEPS, WARMUP, LAUNCHES = 15, 3, 3


def calls_of(record: Record) -> list[tuple[str, int]]:
    """(kind, elements) of the collectives that carry weights or gradients in the record's last step, in order."""
    calls = record.samples[0].calls
    last = max(call.step for call in calls if call.phase in ("forward", "backward", "step"))
    mine = [call for call in calls if call.step == last and call.phase in ("forward", "backward", "step")]
    return [(call.kind.value, call.numel) for call in mine if call.kind in PAYLOAD and call.numel > 1]


def replay(run: Run, context: RankContext) -> Outcome:
    """On a rank: the collectives of run.case.options["calls"] in fp32, STEPS times."""
    import torch
    import torch.distributed as dist

    from zerobench.device import Cpu
    from zerobench.implementations.collectives import all_gather, all_reduce, reduce_scatter
    from zerobench.probes.clock import time_steps

    context.join()
    n, works = context.world_size, []
    for kind, numel in run.case.options["calls"]:
        whole, part = torch.ones(numel), torch.ones(numel // n)
        if kind == Collective.ALL_REDUCE.value:
            works.append(lambda whole=whole: all_reduce(whole, n))
        elif kind == Collective.REDUCE_SCATTER.value:
            works.append(lambda whole=whole, part=part: reduce_scatter(part, whole, n))
        else:
            works.append(lambda whole=whole, part=part: all_gather(whole, part, n))

    def step() -> None:
        for work in works:
            work().wait()

    for _ in range(WARMUP):
        step()
    times = time_steps(step, steps=STEPS, barrier=dist.barrier, seconds=Cpu().seconds)
    return Outcome("ok", Sample(context.rank, times_s=times))


def timed(local: Local, calls: list[tuple[str, int]], n: int) -> float:
    """Seconds of these collectives together: the median over launches of the median of the slowest rank's."""
    if not calls:
        return 0.0
    options: dict[str, Any] = {"calls": [list(call) for call in calls]}
    run = Run("timed", Case("replay", "replay", "mlp-tiny", n, options=options))
    medians = []
    for _ in range(LAUNCHES):
        record = local.launch(run, deadline_s=120.0, target=TARGET)
        if record.status != "ok":
            raise SystemExit(f"replay: {record.reason}")
        medians.append(median(slowest([sample.times_s for sample in record.samples])))
    return median(medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="a results file of zerobench ab")
    results = read(parser.parse_args().result)
    sides = {about.id: about.suite for about in results.provenances.values()}
    heads = ("side", "run", "step", "collectives", "reduce-scatters", "as all-gathers", "excess", "excess / step")
    rows = [heads]
    with Local() as local:
        for side in SIDES:
            for id, launches in results.launches.items():
                mine = [record for record in launches if sides[record.provenance] == suite_of(side)]
                if not mine:
                    continue
                calls, n = calls_of(mine[0]), mine[0].run.case.world_size
                scatters = [call for call in calls if call[0] == Collective.REDUCE_SCATTER.value]
                gathers = [(Collective.ALL_GATHER.value, numel) for _, numel in scatters]
                step = median(step_times(mine))
                whole, scattered, gathered = (timed(local, each, n) for each in (calls, scatters, gathers))
                excess = scattered - gathered
                seconds = [f"{1e3 * s:.1f} ms" for s in (step, whole, scattered, gathered, excess)]
                rows.append((side, id, *seconds, f"{100 * excess / step:.0f} %"))
    print("\n".join(table(rows, right=range(2, 8))))


if __name__ == "__main__":
    main()
