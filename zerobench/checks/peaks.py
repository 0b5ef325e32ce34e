"""Chapter 1, continued: what a rank holds for a moment, inside forward, backward and step."""

from __future__ import annotations

from typing import NamedTuple

from zerobench.checks.check import (
    Check,
    Judgement,
    NotApplicable,
    View,
    holding,
    itemsize,
    per_psi,
    ranks_text,
    signed,
    verdict,
)
from zerobench.finding import Level, Status
from zerobench.record import Record, Sample
from zerobench.terms import Category, Moment, Stage
from zerobench.units import nbytes_text


def gradient_peak(view: View) -> Judgement:
    """The most that backward adds to rest and to the model's own activations, sampled between units."""
    at_rest = max(holding(s, view.last_step - 1, Moment.STEPPED).claimed.get("gradient", 0) for s in view.samples)
    parts = backward_parts(view, at_rest)
    limit, terms = sum(p.nbytes for p in parts), ", and ".join(p.words for p in parts if p.words)
    over = {s.rank: _transient(s, view.main) for s in view.samples}
    worst_rank = max(over, key=lambda r: over[r][0])
    worst, unit = over[worst_rank]
    wrong = tuple(r for r, (b, _) in over.items() if b > limit)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"<= {per_psi(limit, view.psi)} bytes on each rank ({terms})",
        actual=f"{per_psi(worst, view.psi)} on {ranks_text(wrong or over, view.n)} ({nbytes_text(max(worst, 0))}; Psi = {view.psi})"
        + f", most at the boundary after {unit} in BACKWARD of step {view.last_step}",
        ranks=wrong,
        metrics=(("bytes", float(worst)),),
    )


SCALARS_NBYTES = 64
"""One-element tensors (a loss and its gradient, a flag) count nowhere, but are alive at some boundaries."""


def depth(view: View) -> Judgement:
    """Between a shallow and a deep stack of equal blocks, at one bucket a block, only the gradient's share may grow."""
    if not view.stage.shards(Category.GRADIENT):
        raise NotApplicable("stages 0 and 1 keep whole gradients")
    if view.n == 1:
        raise NotApplicable("at n = 1 a share is the whole")
    shallow, deep = (view.records[name] for name in ("depth-4", "depth-32"))
    bucket = view.bucket_numel(shallow)
    width = max(itemsize(view.recipe.gradient), itemsize(view.recipe.reduce or view.recipe.gradient))
    allowance = bucket * width + SCALARS_NBYTES
    assert shallow.model is not None and deep.model is not None
    # Weights that are kept for backward are claimed as such; the paper's stage 3 gathers a unit at a time.
    kept_weights = 0
    if view.claims.gathered and view.stage is Stage.PARAMETER:
        kept_weights = (deep.model.psi - shallow.model.psi) * itemsize(view.recipe.gather or view.recipe.parameter)
    grown = {}
    for few, many in zip(shallow.samples, deep.samples, strict=True):
        transient = _backward_peak(many, deep) - _backward_peak(few, shallow)
        share = _gradient_growth(many, deep) - _gradient_growth(few, shallow)
        kept = _unclaimed(many, deep) - _unclaimed(few, shallow)
        grown[few.rank] = (transient - share, kept)
    worst = max(grown.values(), key=max)
    wrong = tuple(r for r, pair in grown.items() if max(pair) > allowance)
    blocks = len(deep.model.units) - len(shallow.model.units)
    return Judgement(
        claim=verdict(all(inside <= allowance + kept_weights and rest <= allowance for inside, rest in grown.values())),
        paper=verdict(not wrong),
        expected=f"<= one bucket ({nbytes_text(allowance)}) more for {blocks} more units"
        + (f", and {nbytes_text(kept_weights)} of weights that are kept, as claimed" if kept_weights else ""),
        actual=f"{signed(worst[0])} inside backward, {signed(worst[1])} unclaimed at rest, on {ranks_text(wrong, view.n)}",
        ranks=wrong,
        metrics=(("transient_bytes", float(worst[0])), ("unclaimed_bytes", float(worst[1]))),
    )


def parameter_peak(view: View) -> Judgement:
    """At stage 3, gathered weights alive between two units of the forward, over rest and the model's own activations."""
    if not view.stage.shards(Category.PARAMETER):
        raise NotApplicable("weights are whole below stage 3")
    if view.n == 1:
        raise NotApplicable("at n = 1 a share is the whole")
    numel, limit = gathered_numel(view), gathered_part(view).nbytes
    over = {s.rank: _transient(s, view.main, phase="forward") for s in view.samples}
    worst_rank = max(over, key=lambda r: over[r][0])
    worst, unit = over[worst_rank]
    wrong = tuple(r for r, (b, _) in over.items() if b > limit)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"<= {nbytes_text(limit)} of gathered weights ({numel} elements: the unit in use, "
        f"{view.claims.prefetch_units} ahead, the unit around the root)",
        actual=f"{nbytes_text(max(worst, 0))} = {per_psi(worst, view.psi)} on {ranks_text(wrong or over, view.n)}, most after {unit}",
        ranks=wrong,
        metrics=(("bytes", float(worst)),),
    )


def step_peak(view: View) -> Judgement:
    """What a step adds to what is alive before it: casts and the optimizer's temporaries.

    Derivation: the rank updates e elements, its share from stage 1 on. The gradient is cast to fp32 once (4 e bytes); a
    foreach Adam makes one temporary of e elements for the root of the second moment and one for the denominator (8
    e); the new weights are rounded (w e). Beside that one bucket that is gathered or unscaled at a time.
    """
    updated, limit = updated_numel(view), sum(p.nbytes for p in step_parts(view))
    grown = {}
    for sample in view.samples:
        before = holding(sample, view.last_step, Moment.BACKWARD).live
        tops = [p.nbytes - p.backend for p in sample.peaks if p.step == view.last_step and p.phase == "step"]
        if not tops:
            raise NotApplicable("the step was not watched")
        grown[sample.rank] = max(tops) - before
    worst = max(grown.values())
    wrong = tuple(r for r, b in grown.items() if b > limit)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"<= {nbytes_text(limit)}: casts and three temporaries of {updated} elements, and one fp32 bucket",
        actual=f"{nbytes_text(max(worst, 0))} = {per_psi(worst, view.psi)} on {ranks_text(wrong or grown, view.n)}",
        ranks=wrong,
        metrics=(("bytes", float(worst)),),
    )


def init_peak(view: View) -> Judgement:
    """The most that is alive while the engine is built, the fp32 module that it is given included."""
    tops = [p.nbytes for s in view.samples for p in s.peaks if p.phase == "build"]
    if not tops:
        raise NotApplicable("the build was not watched")
    built = max(holding(s, -1, Moment.BUILT).live for s in view.samples)
    return Judgement(
        Status.PASS,
        Status.PASS,
        "",
        f"{per_psi(max(tops), view.psi)} bytes while building, {per_psi(built, view.psi)} when built",
        metrics=(("bytes", float(max(tops))),),
    )


# -- parts -------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Bytes that a phase may hold beyond what was alive before it, for one purpose."""

    name: str
    nbytes: int
    words: str


def updated_numel(view: View) -> int:
    """Elements that a rank's optimizer updates: its share from stage 1 on, with the claimed padding."""
    share = -(-view.psi // (view.claims.shard_size or view.n)) if view.stage.shards(Category.OPTIMIZER) else view.psi
    return share + view.claims.padding_numel


def step_parts(view: View) -> tuple[Part, ...]:
    """What `step` may add; derived in `step_peak`."""
    e, w, bucket = updated_numel(view), itemsize(view.recipe.parameter), view.bucket_numel()
    return (
        Part("casts", e * (4 + w), f"{e} gradients to fp32, and the new weights to {view.recipe.parameter}"),
        Part("optimizer's temporaries", e * 8, f"the second moment's root and the denominator, {e} elements each"),
        Part("buckets", bucket * 4, f"one of {bucket} elements in fp32"),
    )


def gathered_part(view: View) -> Part:
    """Weights that stage 3 may have gathered at once."""
    numel = gathered_numel(view)
    nbytes = numel * itemsize(view.recipe.gather or view.recipe.parameter)
    return Part("gathered weights", nbytes, f"gathered weights of {numel} elements")


def gathered_numel(view: View) -> int:
    """Elements of weights that stage 3 may have gathered at once: the unit in use, those ahead, and the root's; where
    all are kept, all, and the buffer that one unit is gathered into before it is copied to its parameters."""
    if view.claims.gathered:
        return view.psi + max(view.model.units) + view.n * view.claims.padding_numel
    units = sorted(view.model.units, reverse=True)
    return sum(units[: 2 + view.claims.prefetch_units]) + view.n * view.claims.padding_numel


def _transient(sample: Sample, record: Record, phase: str = "backward") -> tuple[int, str]:
    """(bytes, boundary): the most that is alive inside a phase over rest and over the bare model's activations."""
    step = record.run.case.warmup + record.run.case.measured - 1
    rest = holding(sample, step - 1, Moment.STEPPED).live
    inside = [(b.live - rest - b.bare, b.unit) for b in sample.boundaries if (b.step, b.phase) == (step, phase)]
    if not inside:
        raise NotApplicable("this model marks no boundaries between units")
    return max(inside)


def _backward_peak(sample: Sample, record: Record) -> int:
    """Bytes over rest inside backward, and at its end: a share that is allocated at its first gradient may appear only
    after the last boundary of a shallow model."""
    step = record.run.case.warmup + record.run.case.measured - 1
    ended = holding(sample, step, Moment.BACKWARD).live - holding(sample, step - 1, Moment.STEPPED).live
    return max(_transient(sample, record)[0], ended)


def _gradient_growth(sample: Sample, record: Record) -> int:
    """Claimed gradient bytes that appear between rest and BACKWARD: a share that is made anew each step."""
    step = record.run.case.warmup + record.run.case.measured - 1
    name = Category.GRADIENT.value
    before = holding(sample, step - 1, Moment.STEPPED).claimed.get(name, 0)
    return max(0, holding(sample, step, Moment.BACKWARD).claimed.get(name, 0) - before)


def _unclaimed(sample: Sample, record: Record) -> int:
    step = record.run.case.warmup + record.run.case.measured - 1
    return holding(sample, step, Moment.BACKWARD).unclaimed


def backward_parts(view: View, at_rest: int) -> tuple[Part, ...]:
    """What backward may add to rest. at_rest: bytes of gradient that are alive there already.

    Derivation: the gradient itself (whole at stages 0-1, this rank's share from stage 2 on, with the claimed
    padding), less what of it is alive at rest already; what is not yet reduced: one unit that the engine has not
    taken over (0-1), or the bucket being filled and the one in flight (2-3), in the wider of the gradient's and the
    wire's dtype; and at stage 3 the gathered weights of the unit in use, of those ahead, and of the unit around the
    root.
    """
    recipe, claims = view.recipe, view.claims
    g = itemsize(claims.accumulate or recipe.gradient)
    width = max(itemsize(recipe.gradient), itemsize(recipe.reduce or recipe.gradient))
    bucket, unit = view.bucket_numel(), max(view.model.units)
    if not view.stage.shards(Category.GRADIENT):
        whole = max(0, g * (view.psi + claims.padding_numel) - at_rest)
        return (
            Part("gradients", whole, _gradient_words("the gradient", whole, view.psi)),
            Part("buckets", width * max(unit, bucket), "one unit or bucket"),
        )
    s = claims.shard_size or view.n
    share = max(0, g * (-(-view.psi // s) + claims.padding_numel) - at_rest)
    parts = [
        Part("gradients", share, _gradient_words("the share of the gradient", share, view.psi)),
        Part("buckets", 2 * width * (bucket + claims.padding_numel), f"two buckets of {bucket} elements"),
    ]
    return (*parts, gathered_part(view)) if view.stage is Stage.PARAMETER else tuple(parts)


def _gradient_words(what: str, nbytes: int, psi: int) -> str:
    return f"{what}, {per_psi(nbytes, psi)}" if nbytes else ""


CHECKS = (
    Check(
        "memory.gradient_peak",
        Level.MUST,
        "<=",
        "backward holds no more gradient than its stage allows: whole and one unit (0-1), its shard and two buckets (2-3)",
        "g Psi + unit, or g Psi/n + 2 buckets; stage 3 adds the gathered units",
        ("plain",),
        gradient_peak,
        simulated="ranks",
    ),
    Check(
        "memory.depth",
        Level.MUST,
        "<=",
        "what backward adds does not grow with the number of units (stages 2-3)",
        "growth from 4 to 32 blocks <= one bucket",
        ("depth-4", "depth-32"),
        depth,
        simulated="ranks",
    ),
    Check(
        "memory.parameter_peak",
        Level.MUST,
        "<=",
        "stage 3 has no more weights gathered at once than it says: the unit in use, those ahead, the root's",
        "w x (largest units: 1 + prefetch_units + 1)",
        ("plain",),
        parameter_peak,
        simulated="ranks",
    ),
    Check(
        "memory.step_peak",
        Level.SHOULD,
        "<=",
        "the step's own temporaries are casts, the optimizer's, and one bucket",
        "(12 + w) x elements updated + one fp32 bucket",
        ("plain",),
        step_peak,
        simulated="ranks",
    ),
    Check(
        "memory.init_peak",
        Level.INFO,
        "",
        "how much building needs",
        "highest live bytes inside build, in Psi",
        ("plain",),
        init_peak,
        simulated="ranks",
    ),
)
