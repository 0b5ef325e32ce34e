"""Chapter 1: what a rank holds, against (a + b/n) Psi."""

from __future__ import annotations

from fractions import Fraction

from zerobench.analytic import fit, identify, state_nbytes, total, total_coefficients
from zerobench.checks.check import (
    Check,
    Judgement,
    NotApplicable,
    View,
    holding,
    itemsize,
    per_psi,
    ranks_text,
    verdict,
)
from zerobench.claims import Recipe
from zerobench.finding import Level
from zerobench.record import Record, Sample
from zerobench.terms import DTYPE_NBYTES, MODEL_STATES, Category, Moment, Stage
from zerobench.units import nbytes_text


def at_rest(view: View) -> Judgement:
    """Sum over ranks of each category's claimed bytes at BACKWARD of the last step, against n times the formula."""
    n, psi, claims = view.n, view.psi, view.claims
    held = [holding(s, view.last_step, Moment.BACKWARD).claimed for s in view.samples]
    share = state_nbytes(view.recipe, view.stage, psi, n, view.moments, shard_size=claims.shard_size)
    detail, wrong_ranks = [], set()
    padding_ok = claims.padding_numel <= view.padding_cap()
    if not padding_ok:
        detail.append(f"claims {claims.padding_numel} elements of padding; the cap is {view.padding_cap()}")
    off = 0
    for category in MODEL_STATES:
        each = [h.get(category.value, 0) for h in held]
        low = n * share[category]
        if category is Category.GRADIENT and not view.stage.shards(category):
            low = Fraction(low, n)  # stages 0-1 may free what they do not update
        slack = claims.padding_numel * _element_nbytes(category, view.recipe, view.moments)
        high = n * (share[category] + slack)
        if not low <= sum(each) <= high:
            excess = sum(each) - (high if sum(each) > high else low)
            off += abs(int(excess))
            wrong_ranks |= {r for r, b in enumerate(each) if not low / n <= b <= high / n}
            detail.append(
                f"{category.value}: {nbytes_text(sum(each))} over all ranks, should be {_range_text(low, high)} "
                f"({_signed(excess)}, {per_psi(Fraction(sum(each), n), psi)} a rank)"
            )
    totals = [sum(h.get(c.value, 0) for c in MODEL_STATES) for h in held]
    a, b = total_coefficients(view.recipe, view.stage, view.moments)
    paper = total(view.paper_recipe, view.stage, psi, n, view.moments)
    paper_slack = min(claims.padding_numel, view.padding_cap()) * sum(
        _element_nbytes(c, view.paper_recipe, view.moments) for c in MODEL_STATES
    )
    mean = Fraction(sum(totals), n)
    return Judgement(
        claim=verdict(not off and padding_ok),
        paper=verdict(mean <= paper + paper_slack),
        expected=f"{formula(a, b, n)} = {per_psi(total(view.recipe, view.stage, psi, n, view.moments), psi)} bytes a rank"
        + (f", at most {claims.padding_numel} elements of padding a category" if claims.padding_numel else ""),
        actual=f"{per_psi(mean, psi)} ({nbytes_text(max(totals))} on the fullest rank, Psi = {psi}); "
        + ("exact" if not off else f"{nbytes_text(off)} off"),
        ranks=tuple(sorted(wrong_ranks)),
        detail=tuple(detail),
        metrics=(("bytes", float(mean)), ("largest_bytes", float(max(totals)))),
    )


def unclaimed(view: View) -> Judgement:
    """Live bytes that no claim covers, at BACKWARD and STEPPED of every step from the second on."""
    bucket = view.bucket_numel()
    width = max(itemsize(view.recipe.gradient), itemsize(view.recipe.reduce or view.recipe.gradient))
    allowed = 2 * bucket * width
    worst, where, rank, pieces = -1, "", 0, ()
    for sample in view.samples:
        for h in sample.holdings:
            if h.step >= 1 and h.moment in (Moment.BACKWARD, Moment.STEPPED) and h.unclaimed > worst:
                worst, where, rank = h.unclaimed, f"{h.moment.name} of step {h.step}", sample.rank
        labelled = [h for h in sample.holdings if h.moment is Moment.BACKWARD and h.step == view.last_step]
        if sample.rank == rank and labelled:
            pieces = labelled[-1].pieces
    if worst < 0:
        raise NotApplicable("memory was not watched")
    detail = tuple(
        f"{nbytes_text(p.nbytes)} made by {p.by}" + (f", looks like {p.looks_like}" if p.looks_like else "")
        for p in pieces[:4]
    )
    holds = worst <= allowed
    return Judgement(
        claim=verdict(holds),
        paper=verdict(holds),
        expected=f"<= {nbytes_text(allowed)} (two buckets of {bucket} elements)",
        actual=f"{nbytes_text(worst)} = {per_psi(worst, view.psi)}" + (f" on rank {rank} at {where}" if worst else ""),
        ranks=() if holds else (rank,),
        detail=() if holds else detail,
        metrics=(("bytes", float(worst)),),
    )


def gradient_peak(view: View) -> Judgement:
    """The most that backward adds to rest and to the model's own activations, sampled between units."""
    at_rest = max(holding(s, view.last_step - 1, Moment.STEPPED).claimed.get("gradient", 0) for s in view.samples)
    limit, terms = _peak_allowance(view, at_rest)
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


def depth(view: View) -> Judgement:
    """Between a shallow and a deep stack of equal blocks, at one bucket a block, only the gradient's share may grow."""
    if not view.stage.shards(Category.GRADIENT):
        raise NotApplicable("stages 0 and 1 keep whole gradients")
    if view.n == 1:
        raise NotApplicable("at n = 1 a share is the whole")
    shallow, deep = (view.records[name] for name in ("depth-4", "depth-32"))
    bucket = view.bucket_numel(shallow)
    width = max(itemsize(view.recipe.gradient), itemsize(view.recipe.reduce or view.recipe.gradient))
    allowance = bucket * width
    grown = {}
    for few, many in zip(shallow.samples, deep.samples, strict=True):
        transient = _transient(many, deep)[0] - _transient(few, shallow)[0]
        share = _gradient_growth(many, deep) - _gradient_growth(few, shallow)
        kept = _unclaimed(many, deep) - _unclaimed(few, shallow)
        grown[few.rank] = (transient - share, kept)
    worst = max(grown.values(), key=max)
    wrong = tuple(r for r, pair in grown.items() if max(pair) > allowance)
    blocks = len(deep.model.units) - len(shallow.model.units) if deep.model and shallow.model else 0
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"<= one bucket ({nbytes_text(allowance)}) more for {blocks} more units",
        actual=f"{_signed(worst[0])} inside backward, {_signed(worst[1])} unclaimed at rest, on {ranks_text(wrong, view.n)}",
        ranks=wrong,
        metrics=(("transient_bytes", float(worst[0])), ("unclaimed_bytes", float(worst[1]))),
    )


def rest_returns(view: View) -> Judgement:
    """Live bytes at STEPPED are the same for every step from the second on."""
    seen = {
        s.rank: {h.step: h.live for h in s.holdings if h.moment is Moment.STEPPED and h.step >= 1} for s in view.samples
    }
    if any(len(steps) < 2 for steps in seen.values()):
        raise NotApplicable("needs at least two steps after the first")
    grown = {r: max(v.values()) - min(v.values()) for r, v in seen.items()}
    wrong = tuple(r for r, g in grown.items() if g)
    rank = max(grown, key=lambda r: grown[r])
    trail = ", ".join(f"step {k}: {nbytes_text(v)}" for k, v in sorted(seen[rank].items()))
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected="0 B of change from step 1 on",
        actual=f"{nbytes_text(grown[rank])} of change on {ranks_text(wrong, view.n)}",
        ranks=wrong,
        detail=(f"rank {rank}: {trail}",) if wrong else (),
        metrics=(("bytes", float(grown[rank])),),
    )


def scaling(view: View) -> Judgement:
    """The stage that the bytes of several world sizes identify, whatever is claimed."""
    points: dict[int, Fraction] = {}
    for record in view.family:
        assert record.model is not None
        step = record.run.case.warmup + record.run.case.measured - 1
        n = record.run.case.world_size
        held = [holding(s, step, Moment.BACKWARD) for s in record.samples]
        states = sum(sum(h.claimed.get(c.value, 0) for c in MODEL_STATES) for h in held)
        points[n] = Fraction(states, n * record.model.psi)
    if len(points) < 3:
        raise NotApplicable(f"needs at least three world sizes, has n = {', '.join(map(str, sorted(points)))}")
    line = fit(points)
    found = identify(line.a, line.b, view.recipe, view.moments)
    by_paper = identify(line.a, line.b, view.paper_recipe, view.moments)
    a, b = total_coefficients(view.recipe, view.stage, view.moments)
    held_text = f"{float(line.a):.2f} Psi + {float(line.b):.2f} Psi/n"
    named = f"stage {int(found)}" if found is not None else "no stage of this recipe"
    return Judgement(
        claim=verdict(found == view.stage),
        paper=verdict((by_paper if by_paper is not None else -1) >= view.stage or found == view.stage),
        expected=f"claims stage {int(view.stage)}: {a} Psi + {b} Psi/n",
        actual=f"holds {held_text}: {named} (n = {', '.join(map(str, sorted(points)))}; residual {float(line.residual):.2g} Psi)",
        metrics=(("a", float(line.a)), ("b", float(line.b))),
    )


# -- parts -------------------------------------------------------------------------------------------------------------


def formula(a: int, b: int, n: int) -> str:
    """ "2 Psi + 14 Psi/4", leaving out what is zero."""
    parts = [f"{a} Psi" if a else "", f"{b} Psi/{n}" if b else ""]
    return " + ".join(p for p in parts if p) or "0"


def _transient(sample: Sample, record: Record) -> tuple[int, str]:
    """(bytes, boundary): the most that is alive inside backward over rest and over the bare model's activations."""
    step = record.run.case.warmup + record.run.case.measured - 1
    rest = holding(sample, step - 1, Moment.STEPPED).live
    inside = [(b.live - rest - b.bare, b.unit) for b in sample.boundaries if b.step == step]
    if not inside:
        raise NotApplicable("this model marks no boundaries between units")
    return max(inside)


def _gradient_growth(sample: Sample, record: Record) -> int:
    """Claimed gradient bytes that appear between rest and BACKWARD: a share that is made anew each step."""
    step = record.run.case.warmup + record.run.case.measured - 1
    name = Category.GRADIENT.value
    before = holding(sample, step - 1, Moment.STEPPED).claimed.get(name, 0)
    return max(0, holding(sample, step, Moment.BACKWARD).claimed.get(name, 0) - before)


def _unclaimed(sample: Sample, record: Record) -> int:
    step = record.run.case.warmup + record.run.case.measured - 1
    return holding(sample, step, Moment.BACKWARD).unclaimed


def _peak_allowance(view: View, at_rest: int) -> tuple[int, str]:
    """Bytes that backward may add to rest, and in words.

    Derivation: the gradient itself (whole at stages 0-1, this rank's share from stage 2 on, with the claimed padding), less
    what of it is alive at rest already; what is not yet reduced: one unit that the engine has not taken over (0-1), or the
    bucket being filled and the one in flight (2-3), in the wider of the gradient's and the wire's dtype; and at stage 3
    the gathered weights of the unit in use, of those ahead, and of the unit around the root.
    """
    recipe, claims = view.recipe, view.claims
    g = itemsize(claims.accumulate or recipe.gradient)
    width = max(itemsize(recipe.gradient), itemsize(recipe.reduce or recipe.gradient))
    bucket, unit = view.bucket_numel(), max(view.model.units)
    if not view.stage.shards(Category.GRADIENT):
        whole = max(0, g * (view.psi + claims.padding_numel) - at_rest)
        return whole + width * max(unit, bucket), f"{_gradient_words('the gradient', whole, view.psi)}one unit or bucket"
    s = claims.shard_size or view.n
    share = max(0, g * (-(-view.psi // s) + claims.padding_numel) - at_rest)
    limit = share + 2 * width * (bucket + claims.padding_numel)
    words = f"{_gradient_words('the share of the gradient', share, view.psi)}two buckets of {bucket} elements"
    if view.stage is Stage.PARAMETER:
        w = itemsize(recipe.gather or recipe.parameter)
        units = sorted(view.model.units, reverse=True)
        gathered = sum(units[: 2 + claims.prefetch_units]) + claims.padding_numel
        if claims.gathered:
            gathered = view.psi + claims.padding_numel
        limit += w * gathered
        words += f", and gathered weights of {gathered} elements"
    return limit, words


def _gradient_words(what: str, nbytes: int, psi: int) -> str:
    return f"{what}, {per_psi(nbytes, psi)}, and " if nbytes else ""


def _element_nbytes(category: Category, recipe: Recipe, moments: int) -> int:
    if category is Category.PARAMETER:
        return DTYPE_NBYTES[recipe.parameter]
    if category is Category.GRADIENT:
        return DTYPE_NBYTES[recipe.gradient]
    master = DTYPE_NBYTES[recipe.master] if recipe.master else 0
    return master + moments * DTYPE_NBYTES[recipe.moments]


def _range_text(low: Fraction, high: Fraction) -> str:
    return nbytes_text(low) if low == high else f"{nbytes_text(low)} to {nbytes_text(high)}"


def _signed(nbytes: Fraction | int) -> str:
    sign = "-" if nbytes < 0 else "+"
    return f"{sign}{nbytes_text(abs(nbytes))}"


CHECKS = (
    Check(
        "memory.at_rest",
        Level.MUST,
        "==",
        "model states cost the recipe's bytes at this stage and n: the sum over ranks exactly, each rank within its padding",
        "(a + b/n) Psi by category, at BACKWARD of a step after the first",
        ("plain",),
        at_rest,
        mutants=("replicated-moments", "bf16-master", "claims-half"),
    ),
    Check(
        "memory.unclaimed",
        Level.MUST,
        "<=",
        "live bytes that no category explains stay under the buckets",
        "two buckets of the gradient's or the wire's dtype",
        ("plain",),
        unclaimed,
        mutants=("leaked-full-gradient", "claims-clones"),
    ),
    Check(
        "memory.gradient_peak",
        Level.MUST,
        "<=",
        "backward holds no more gradient than its stage allows: whole and one unit (0-1), its shard and two buckets (2-3)",
        "g Psi + unit, or g Psi/n + 2 buckets; stage 3 adds the gathered units",
        ("plain",),
        gradient_peak,
        mutants=("reduce-after-backward", "kept-view"),
    ),
    Check(
        "memory.depth",
        Level.MUST,
        "<=",
        "what backward adds does not grow with the number of units (stages 2-3)",
        "growth from 4 to 32 blocks <= one bucket",
        ("depth-4", "depth-32"),
        depth,
        mutants=("reduce-after-backward", "kept-view"),
    ),
    Check(
        "memory.rest_returns",
        Level.MUST,
        "==",
        "bytes at rest are the same after every step from the second on",
        "live(STEPPED, k) = live(STEPPED, 1) for k > 1",
        ("plain",),
        rest_returns,
        mutants=("leak-per-step",),
    ),
    Check(
        "memory.scaling",
        Level.MUST,
        "==",
        "over at least three world sizes the bytes follow the claimed stage's a + b/n",
        "least squares over 1/n; the nearest stage within half a byte",
        ("plain",),
        scaling,
        over="family",
        mutants=("replicated-moments",),
    ),
)
