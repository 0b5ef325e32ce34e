"""Chapter 4: the work that sharding divides."""

from __future__ import annotations

from zerobench.checks.check import Check, Judgement, NotApplicable, View, verdict
from zerobench.finding import Level
from zerobench.terms import Category


def sharded(view: View) -> Judgement:
    """Elements that a rank's optimizer wrote in the last step."""
    if not view.stage.shards(Category.OPTIMIZER) or view.n == 1:
        raise NotApplicable("no optimizer states are sharded")
    updated = {s.rank: s.updated_numel for s in view.samples}
    if not all(updated.values()):
        raise NotApplicable("this optimizer's update was not recognised among torch's rules")
    total = sum(v or 0 for v in updated.values())
    copies = view.n // (view.claims.shard_size or view.n)
    limit = copies * (view.psi + view.n * view.claims.padding_numel)
    fullest = max(updated, key=lambda r: updated[r] or 0)
    holds = total <= limit
    return Judgement(
        claim=verdict(holds),
        paper=verdict(holds),
        expected=f"<= {limit} elements over all ranks: each once" + (f" a replica ({copies})" if copies > 1 else ""),
        actual=f"{total} over all ranks, {(updated[fullest] or 0) / view.psi:.2f} Psi on rank {fullest}",
        metrics=(("elements", float(total)),),
    )


CHECKS = (
    Check(
        "work.sharded",
        Level.SHOULD,
        "<=",
        "from stage 1 on each element is updated by one rank, not by all",
        "elements written by update rules, summed over ranks, <= Psi and padding",
        ("plain",),
        sharded,
        simulated="world",
    ),
)
