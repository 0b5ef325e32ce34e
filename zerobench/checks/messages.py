"""Chapter 2, continued: what travels, in which dtype, with how much padding, and when."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from zerobench.checks.check import Check, Judgement, NotApplicable, View, payload, per_psi, ranks_text, verdict
from zerobench.checks.traffic import claimed_volume, step_volumes
from zerobench.finding import Level
from zerobench.record import Call, Record, Sample
from zerobench.terms import Collective
from zerobench.units import nbytes_text

_WEIGHTS = (Collective.ALL_GATHER, Collective.BROADCAST)


def dtype(view: View) -> Judgement:
    """Kinds that reduce carry gradients, all-gathers and broadcasts weights: each in the claimed dtype."""
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    recipe = view.recipe
    gradients, weights = recipe.reduce or recipe.gradient, recipe.gather or recipe.parameter
    wrong: Counter[str] = Counter()
    ranks = set()
    for sample in view.samples:
        for call in payload(sample.calls, view.measured_steps, view.model):
            right = _right(call, gradients, weights)
            if call.dtype not in right:
                wrong[f"{call.kind.value} in {call.phase} of {call.dtype}"] += call.numel
                ranks.add(sample.rank)
    total = len(view.samples) * len(view.measured_steps)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"gradients in {gradients}, weights in {weights}",
        actual=", ".join(f"{what}: {per_psi(v / total, view.psi)} a step" for what, v in sorted(wrong.items()))
        or "as claimed",
        ranks=tuple(sorted(ranks)),
    )


def _right(call: Call, gradients: str, weights: str) -> set[str]:
    """The dtypes that a call may have. Point to point and all-to-all may carry either."""
    if call.kind.reduces:
        return {gradients}
    if call.kind in _WEIGHTS:
        return {weights}
    return {gradients, weights}


def padding(view: View) -> Judgement:
    """Payload beyond the volume's whole multiples of Psi."""
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    a = view.main.run.case.micro_batches
    claimed = claimed_volume(view, a)
    allowed = claimed * view.padding_total()
    excess = max(Fraction(0), max(step_volumes(view.main).values()) - claimed * view.psi)
    cap_ok = view.claims.padding_numel <= view.padding_cap()
    holds = excess <= allowed and cap_ok
    return Judgement(
        claim=verdict(holds),
        paper=verdict(holds),
        expected=f"<= {int(allowed)} elements a step ({view.claims.padding_numel} a rank and category; "
        f"the cap is {view.padding_cap()})",
        actual=f"{int(excess)} elements",
        metrics=(("elements", float(excess)),),
    )


def single(view: View) -> Judgement:
    """One rank sends no payload."""
    if view.n > 1:
        raise NotApplicable("judged at n = 1")
    calls = [c for s in view.samples for c in payload(s.calls, view.measured_steps, view.model)]
    kinds = Counter(c.kind.value for c in calls)
    nbytes = sum(c.nbytes for c in calls) // len(view.measured_steps)
    listed = ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
    return Judgement(
        claim=verdict(not calls),
        paper=verdict(not calls),
        expected="no collective with a payload",
        actual=f"{nbytes_text(nbytes)} a step in collectives of one rank ({listed})" if calls else "none",
    )


LEAST_HIDDEN = 0.01
"""Less of the gradients' travelling than this beside computing is none: a copy that happened to run meanwhile."""


def overlap(view: View) -> Judgement:
    """Whether gradients begin to travel before the last unit's exists, and whether anything is computed meanwhile: who
    issues early and waits at once hides nothing. The second from a run of its own, where there is one."""
    if "overlap" not in view.claims.supports:
        raise NotApplicable("overlap is not claimed")
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    late = {sample.rank: _sent_late(view, sample) for sample in view.samples}
    idle = _exposed(view.records.get("flight"))
    wrong = {rank for rank, share in late.items() if share == 1.0}
    wrong |= {rank for rank, share in idle.items() if share > 1 - LEAST_HIDDEN}
    worst = max(late.values())
    actual = f"{worst:.0%} of the elements are sent after the last boundary of backward"
    metrics = [("late", worst)]
    if "flight" in view.records and not idle:
        actual += "; what is computed meanwhile could not be seen"
    if idle:
        metrics.append(("exposed", max(idle.values())))
        actual += f"; {max(idle.values()):.0%} of the time on the way nothing is computed"
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected="gradients begin to travel before the first unit's gradient exists, and backward goes on meanwhile",
        actual=actual + (f" on {ranks_text(wrong, view.n)}" if wrong else ""),
        ranks=tuple(sorted(wrong)),
        detail=("issued in backward, and then backward waits until they are over",) if wrong and worst < 1 else (),
        metrics=tuple(metrics),
    )


def _sent_late(view: View, sample: Sample) -> float:
    """The share of the last step's reduced elements that are issued after the last boundary between units."""
    passed = [b for b in sample.boundaries if b.phase == "backward" and b.step == view.last_step]
    if len(passed) < 2:
        raise NotApplicable("this model marks no boundaries between units")
    place = {id(c): i for i, c in enumerate(sample.calls)}
    reduced = [
        c
        for c in payload(sample.calls, [view.last_step], view.model)
        if c.phase in ("backward", "step") and c.kind is not Collective.ALL_GATHER
    ]
    before = sum(c.numel for c in reduced if place[id(c)] < passed[-1].calls)
    total = sum(c.numel for c in reduced)
    return 1 - before / total if total else 0.0


def _exposed(record: Record | None) -> dict[int, float]:
    """By rank, the share of the gradients' time on the way in which nothing is computed: the sum of weight x (1 - hidden)
    over the sum of weights, all of `record.Flight`.

    Only of ranks whose reductions carry at least half of Psi in the step. Where gradients travel by another kind, what
    is reduced is a norm or a flag, and says nothing of them.
    """
    if record is None or record.model is None:
        return {}
    last = record.run.case.warmup + record.run.case.measured - 1
    shares = {}
    for sample in record.samples:
        reduced = sum(c.numel for c in payload(sample.calls, [last], record.model) if c.kind.reduces)
        flights = sample.flights or ()
        whole = sum(flight.weight for flight in flights)
        if whole and 2 * reduced >= record.model.psi:
            shares[sample.rank] = sum(f.weight * (1 - f.hidden) for f in flights) / whole
    return shares


CHECKS = (
    Check(
        "traffic.dtype",
        Level.MUST,
        "==",
        "gradients and weights travel in the claimed dtypes",
        "Recipe.reduce or gradient; Recipe.gather or parameter; control traffic exempt",
        ("plain",),
        dtype,
        simulated="ranks",
    ),
    Check(
        "traffic.padding",
        Level.MUST,
        "<=",
        "payload beyond Psi is the claimed padding",
        "volume - claimed passes x Psi <= claimed passes x padding",
        ("plain",),
        padding,
        simulated="ranks",
    ),
    Check(
        "traffic.single",
        Level.SHOULD,
        "==",
        "one rank alone sends nothing",
        "no payload at n = 1",
        ("plain",),
        single,
        simulated="ranks",
    ),
    Check(
        "traffic.overlap",
        Level.SHOULD,
        "==",
        "where overlap is claimed, gradients travel while backward goes on",
        "a reduction issued before the last boundary between units; 1 % of the time on the way beside computing",
        ("plain",),
        overlap,
        also=("flight",),
        simulated="ranks",
    ),
)
