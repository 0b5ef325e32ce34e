"""Records made by hand: what a correct stage 2 would leave behind, with one thing changed at will. No ranks, no
torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerobench.case import Case
from zerobench.claims import Claims
from zerobench.record import Boundary, Call, Comparison, Digest, Holding, ModelFacts, Record, Report, Sample
from zerobench.terms import Collective, Moment, Stage

PSI, N = 1200, 4  # 1200 = 4 x 300: no padding
SUPPORTS = frozenset({"bucket", "accumulation", "full_gradients", "full_optimizer_state", "overlap"})
CLAIMS = Claims(Stage.GRADIENT, supports=SUPPORTS)
MODEL = ModelFacts(
    PSI, units=(400, 400, 400), parameters={"a": 150, "b": 150, "c": 900}, bucket_numel=150, examples=2, tokens=2
)
CASE = Case("zero2", "zero2", "gpt-tiny", N, "bf16")


def held(step: int, moment: Moment, **more: Any) -> Holding:
    claimed = {"parameter": 2 * PSI, "gradient": 2 * PSI // N, "optimizer": 12 * PSI // N}
    return replace(Holding(step, moment, claimed, live=sum(claimed.values()), unclaimed=0), **more)


def calls(step: int) -> tuple[Call, ...]:
    group = tuple(range(N))
    return (
        Call(step, "backward", Collective.REDUCE_SCATTER, PSI, 2 * PSI, "bf16", group),
        Call(step, "step", Collective.ALL_GATHER, PSI, 2 * PSI, "bf16", group),
    )


def sample(rank: int) -> Sample:
    """A rank that does everything right for four steps, one of them warm-up."""
    steps = range(4)
    return Sample(
        rank,
        calls=tuple(c for k in steps for c in calls(k)),
        holdings=tuple(held(k, m) for k in steps for m in (Moment.BACKWARD, Moment.STEPPED)),
        allocator=(None,) * 8,
        boundaries=tuple(
            Boundary(3, f"block {b}", held(3, Moment.STEPPED).live + 600, 100, calls=7 - b) for b in (2, 1, 0)
        ),
        comparisons=tuple(Comparison(k, w, "a", 150, 0) for k in steps for w in ("gradient", "parameter")),
        digests=tuple(Digest(k, "replicated parameter", f"bits{k}", 2 * PSI) for k in range(-1, 4)),
        reports=tuple(Report(k, 1.0) for k in steps),
        times_s=(0.01,) * 7,
        updated_numel=PSI // N,
    )


def record(scenario: str = "plain", case: Case = CASE, **more: Any) -> Record:
    """A run of `scenario`, right in every way but `more`; `samples` may be a function of a sample that changes it."""
    change = more.pop("change", lambda s: s)
    samples = tuple(change(sample(rank)) for rank in range(case.world_size))
    return replace(
        Record("made", case.run(scenario), "ok", claims=CLAIMS, model=MODEL, samples=samples, wall_s=0.1), **more
    )
