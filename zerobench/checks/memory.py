"""Chapter 1: what a rank holds, against (a + b/n) Psi."""

from __future__ import annotations

from fractions import Fraction

from zerobench.analytic import fit, identify, state_nbytes, total, total_coefficients
from zerobench.checks.check import (
    Check,
    Judgement,
    NotApplicable,
    Unreliable,
    View,
    holding,
    itemsize,
    per_psi,
    ranks_text,
    signed,
    verdict,
)
from zerobench.checks.shares import element_nbytes, refuse_uneven
from zerobench.finding import Level
from zerobench.record import Piece
from zerobench.terms import MODEL_STATES, Category, Moment, Stage
from zerobench.units import nbytes_text

CLOSURE_NBYTES = 1 << 20
"""What malloc counts beside tensors: some 0.5 kB a tensor, and what libraries keep once they have run (a matrix product
leaves 0.5 MB)."""


def at_rest(view: View) -> Judgement:
    """Sum over ranks of each category's claimed bytes at BACKWARD of the last step, against n times the formula;
    where only some ranks ran (simulated), each of them is held to its share.
    """
    n, psi, claims = view.n, view.psi, view.claims
    held = [holding(s, view.last_step, Moment.BACKWARD).claimed for s in view.samples]
    m = len(held)
    share = state_nbytes(view.recipe, view.stage, psi, n, view.moments, shard_size=claims.shard_size)
    detail, wrong_ranks = [], set()
    padding_ok = claims.padding_numel <= view.padding_cap()
    if not padding_ok:
        detail.append(f"claims {claims.padding_numel} elements of padding; the cap is {view.padding_cap()}")
    off = 0
    for category in MODEL_STATES:
        each = [h.get(category.value, 0) for h in held]
        low = m * share[category]
        if category is Category.GRADIENT and not view.stage.shards(category):
            low = Fraction(low, n)  # stages 0-1 may free what they do not update
        slack = claims.padding_numel * element_nbytes(category, view.recipe, view.moments)
        high = m * (share[category] + slack)
        least = low / m - (slack if view.main.partial else 0)  # one rank's share may be the padding
        outside = {s.rank for s, b in zip(view.samples, each, strict=True) if not least <= b <= high / m}
        if view.main.partial and outside and view.stage.shards(category):
            refuse_uneven(view, category, each, share[category] + slack)
        if outside if view.main.partial else not low <= sum(each) <= high:
            excess = sum(each) - (high if sum(each) > high else low)
            off += abs(int(excess))
            wrong_ranks |= outside
            detail.append(
                f"{category.value}: {nbytes_text(sum(each))} over {'the' if view.main.partial else 'all'} ranks, should be "
                f"{_range_text(low, high)} ({signed(excess)}, {per_psi(Fraction(sum(each), m), psi)} a rank)"
            )
    totals = [sum(h.get(c.value, 0) for c in MODEL_STATES) for h in held]
    mean = Fraction(sum(totals), m)
    if off:
        detail += _resembles(view, mean)
    a, b = total_coefficients(view.recipe, view.stage, view.moments)
    paper = total(view.paper_recipe, view.stage, psi, n, view.moments)
    each_paper = sum(element_nbytes(c, view.paper_recipe, view.moments) for c in MODEL_STATES)
    paper_slack = min(claims.padding_numel, view.padding_cap()) * each_paper
    return Judgement(
        claim=verdict(not off and padding_ok),
        paper=verdict(mean <= paper + paper_slack),
        expected=f"{formula(a, b, claims.shard_size or n)} = {per_psi(sum(share.values()), psi)} bytes a rank"
        + (f", at most {claims.padding_numel} elements of padding a category" if claims.padding_numel else ""),
        actual=f"{per_psi(mean, psi)} ({nbytes_text(max(totals))} on the fullest rank, Psi = {psi}); "
        + ("exact" if not off else f"{nbytes_text(off)} off"),
        ranks=tuple(sorted(wrong_ranks)),
        detail=tuple(detail),
        metrics=(("bytes", float(mean)), ("largest_bytes", float(max(totals)))),
    )


def _resembles(view: View, mean: Fraction) -> list[str]:
    """The stage whose formula the measured bytes meet at this n, where there is one other than the claimed."""
    close = [
        stage
        for stage in Stage
        if stage is not view.stage
        and abs(total(view.recipe, stage, view.psi, view.n, view.moments) - mean) <= Fraction(view.psi, 10)
    ]
    return [f"that is what stage {int(stage)} holds at n = {view.n}" for stage in close]


def unclaimed(view: View) -> Judgement:
    """Live bytes that no claim covers, at BACKWARD and STEPPED of every step from the second on.

    Stages 0 and 1 may keep the gradient's buffer from step to step without showing it between steps (DDP's buckets,
    after zero_grad): at STEPPED what the claim lacks of a whole gradient is theirs.
    """
    bucket = view.bucket_numel()
    g = itemsize(view.recipe.gradient)
    allowed = 2 * bucket * max(g, itemsize(view.recipe.reduce or view.recipe.gradient))
    whole = 0 if view.stage.shards(Category.GRADIENT) else g * (view.psi + view.claims.padding_numel)
    worst, where, rank = -1, "", 0
    pieces: tuple[Piece, ...] = ()
    for sample in view.samples:
        for h in sample.holdings:
            if h.step < 1 or h.moment not in (Moment.BACKWARD, Moment.STEPPED):
                continue
            hidden = max(0, whole - h.claimed.get("gradient", 0)) if h.moment is Moment.STEPPED else 0
            if (left := max(0, h.unclaimed - hidden)) > worst:
                worst, where, rank = left, f"{h.moment.name} of step {h.step}", sample.rank
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


def rest_returns(view: View) -> Judgement:
    """Live bytes at STEPPED are the same for every step from the second on, in every run."""
    grown: dict[tuple[str, int], int] = {}
    trails: dict[tuple[str, int], str] = {}
    for name, record in view.records.items():
        for s in record.samples:
            live = {h.step: h.live for h in s.holdings if h.moment is Moment.STEPPED and h.step >= 1}
            if len(live) < 2:
                raise NotApplicable("needs at least two steps after the first")
            grown[name, s.rank] = max(live.values()) - min(live.values())
            trails[name, s.rank] = ", ".join(f"step {k}: {nbytes_text(v)}" for k, v in sorted(live.items()))
    worst = max(grown, key=lambda key: grown[key])
    wrong = tuple(sorted({rank for (_, rank), g in grown.items() if g}))
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected="0 B of change from step 1 on",
        actual=f"{nbytes_text(grown[worst])} of change on {ranks_text(wrong, view.n)}"
        + (f" ({worst[0]})" if wrong else ""),
        ranks=wrong,
        detail=(f"{worst[0]}, rank {worst[1]}: {trails[worst]}",) if wrong else (),
        metrics=(("bytes", float(grown[worst])),),
    )


def scaling(view: View) -> Judgement:
    """The stage that the bytes of several world sizes identify, whatever is claimed."""
    points: dict[int, Fraction] = {}
    for record in view.family:
        assert record.model is not None
        step = record.run.case.warmup + record.run.case.measured - 1
        n = record.run.case.world_size
        held = [holding(s, step, Moment.BACKWARD) for s in record.samples]
        states = [sum(h.claimed.get(c.value, 0) for c in MODEL_STATES) for h in held]
        if record.partial and len(set(states)) > 1:
            raise NotApplicable(f"at n = {n} the ranks that ran hold different amounts: their mean is not the world's")
        points[n] = Fraction(sum(states), len(states) * record.model.psi)
    sizes = f"n = {', '.join(map(str, sorted(points)))}"
    if len(points) < 2:
        raise NotApplicable(f"needs at least three world sizes, has {sizes}")
    line = fit(points)
    found = identify(line.a, line.b, view.recipe, view.moments)
    if len(points) < 3:
        held_text = f"{float(line.a):.2f} Psi + {float(line.b):.2f} Psi/n"
        named = f"stage {int(found)}" if found is not None else "no stage of this recipe"
        raise NotApplicable(f"needs at least three world sizes; {sizes} alone suggest {held_text}: {named}")
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


def balance(view: View) -> Judgement:
    """The fullest rank's bytes of what is sharded, over the mean."""
    sharded = [c for c in MODEL_STATES if view.stage.shards(c)]
    if not sharded or view.n == 1:
        raise NotApplicable("nothing is sharded")
    held = [
        sum(holding(s, view.last_step, Moment.BACKWARD).claimed.get(c.value, 0) for c in sharded) for s in view.samples
    ]
    mean = Fraction(sum(held), view.n)
    pad = (view.claims.padding_numel + 1) * sum(element_nbytes(c, view.recipe, view.moments) for c in sharded)
    fullest = max(range(view.n), key=lambda r: held[r])
    holds = held[fullest] <= mean + pad
    return Judgement(
        claim=verdict(holds),
        paper=verdict(holds),
        expected="every rank the same share, but for one element and the padding",
        actual=f"rank {fullest} holds {float(held[fullest] / mean):.2f} times the mean ({nbytes_text(held[fullest])})"
        if mean
        else "nothing held",
        ranks=() if holds else (fullest,),
        detail=() if holds else tuple(f"rank {r}: {nbytes_text(b)}" for r, b in enumerate(held)),
        metrics=(("ratio", float(held[fullest] / mean) if mean else 1.0),),
    )


def dtype(view: View) -> Judgement:
    """The dtypes of all that is claimed, bytes by category."""
    recipe = view.recipe
    allowed = {
        Category.PARAMETER: {recipe.parameter},
        Category.GRADIENT: {recipe.gradient, view.claims.accumulate or recipe.gradient},
        Category.OPTIMIZER: {recipe.moments} | ({recipe.master} if recipe.master else set()),
    }
    wrong: dict[str, int] = {}
    ranks = set()
    for sample in view.samples:
        for h in sample.holdings:
            for category, dtypes in allowed.items():
                for name, nbytes in h.dtypes.get(category.value, {}).items():
                    if nbytes and name not in dtypes:
                        wrong[f"{category.value} in {name}"] = nbytes
                        ranks.add(sample.rank)
    paper = view.paper_recipe
    low = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
    narrow = low.get(recipe.master or recipe.parameter, 0) < low[paper.master or paper.parameter]
    narrow = narrow or low.get(recipe.moments, 0) < low[paper.moments]
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong and not narrow),
        expected=", ".join(f"{c.value} in {' or '.join(sorted(d))}" for c, d in allowed.items()),
        actual=", ".join(f"{what} ({nbytes_text(b)})" for what, b in sorted(wrong.items())) or "as claimed",
        ranks=tuple(sorted(ranks)),
    )


def frozen(view: View) -> Judgement:
    """On a model with frozen parameters: gradients and optimizer states of the others only."""
    share = state_nbytes(view.recipe, view.stage, view.psi, view.n, view.moments, shard_size=view.claims.shard_size)
    held = [holding(s, view.last_step, Moment.BACKWARD) for s in view.samples]
    out, worst = [], 0
    singles = sum(1 for numel in view.model.parameters.values() if numel == 1)
    for category in (Category.GRADIENT, Category.OPTIMIZER):
        total_held = sum(h.claimed.get(category.value, 0) for h in held)
        slack = (view.claims.padding_numel + singles) * element_nbytes(category, view.recipe, view.moments)
        allowed = len(held) * (share[category] + slack)
        worst = max(worst, int(total_held - allowed))
        if total_held > allowed:
            out.append(f"{category.value}: {nbytes_text(total_held)} over all ranks, should be {nbytes_text(allowed)}")
    return Judgement(
        claim=verdict(not out),
        paper=verdict(not out),
        expected=f"gradients and optimizer states of the {view.psi} trainable elements; {view.model.frozen} are frozen",
        actual="; ".join(out) or "frozen parameters cost their weights only",
    )


def closure(view: View) -> Judgement:
    """What malloc has handed out, against the ledger, on a model of 2M parameters.

    A backend's threads keep a collective's buffers for a moment after it is over, so single readings may be high. What
    the ledger does not know is there at every moment: the smallest gap of a rank's readings from step 1 on is judged.
    """
    gaps: dict[int, list[tuple[int, int]]] = {}
    for sample in view.samples:
        counts = sample.allocator or (None,) * len(sample.holdings)
        for h, counted in zip(sample.holdings, counts, strict=True):
            if counted is None:
                raise NotApplicable("this machine's allocator does not count what it hands out")
            if h.step >= 1:
                gaps.setdefault(sample.rank, []).append((abs(counted - h.live), h.live))
    if not gaps:
        raise NotApplicable("memory was not watched")
    least = {rank: min(found) for rank, found in gaps.items()}
    wrong = [rank for rank, (gap, live) in least.items() if gap > max(CLOSURE_NBYTES, live // 50)]
    rank = max(least, key=lambda r: least[r][0])
    gap, live = least[rank]
    if wrong:
        raise Unreliable(
            f"the C allocator has {nbytes_text(gap)} that the ledger does not know, at every moment on "
            f"{ranks_text(wrong, view.n)} (the ledger knows {nbytes_text(live)})"
        )
    return Judgement(
        verdict(True),
        verdict(True),
        f"within 2 % or {nbytes_text(CLOSURE_NBYTES)}",
        f"{nbytes_text(gap)} unexplained at worst, of {nbytes_text(live)}",
        metrics=(("bytes", float(gap)),),
    )


# -- parts -------------------------------------------------------------------------------------------------------------


def formula(a: int, b: int, n: int) -> str:
    """ "2 Psi + 14 Psi/4", leaving out what is zero."""
    parts = [f"{a} Psi" if a else "", f"{b} Psi/{n}" if b else ""]
    return " + ".join(p for p in parts if p) or "0"


def _range_text(low: Fraction, high: Fraction) -> str:
    return nbytes_text(low) if low == high else f"{nbytes_text(low)} to {nbytes_text(high)}"


CHECKS = (
    Check(
        "memory.at_rest",
        Level.MUST,
        "==",
        "model states cost the recipe's bytes at this stage and n: the sum over ranks exactly, but for the claimed padding",
        "(a + b/n) Psi by category, at BACKWARD of a step after the first",
        ("plain",),
        at_rest,
        simulated="ranks",
    ),
    Check(
        "memory.unclaimed",
        Level.MUST,
        "<=",
        "live bytes that no category explains stay under the buckets",
        "two buckets of the gradient's or the wire's dtype",
        ("plain",),
        unclaimed,
        simulated="ranks",
    ),
    Check(
        "memory.rest_returns",
        Level.MUST,
        "==",
        "bytes at rest are the same after every step from the second on",
        "live(STEPPED, k) = live(STEPPED, 1) for k > 1",
        ("plain",),
        rest_returns,
        also=("evaluation", "overflow-memory"),
        simulated="ranks",
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
        simulated="ranks",
    ),
    Check(
        "memory.balance",
        Level.SHOULD,
        "==",
        "no rank holds more of what is sharded than the mean",
        "largest / mean = 1 within padding",
        ("plain",),
        balance,
        simulated="world",
    ),
    Check(
        "memory.dtype",
        Level.MUST,
        "==",
        "every model-state tensor has the claimed dtype",
        "dtypes by category; the paper's masters and moments are fp32",
        ("plain",),
        dtype,
        simulated="ranks",
    ),
    Check(
        "memory.frozen",
        Level.MUST,
        "==",
        "frozen parameters cost their own weights only",
        "gradient and optimizer bytes of the trainable elements",
        ("frozen",),
        frozen,
        simulated="ranks",
    ),
    Check(
        "memory.closure",
        Level.MUST,
        "within",
        "an independent count of the device's allocator agrees with the ledger at each moment",
        "least |malloc - ledger| of a rank's moments <= max(2 %, 1 MiB), on a model of 2M parameters",
        ("wire",),
        closure,
    ),
)
