"""What is alive at a moment between phases, from the paper's formula to the ledger's count."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from zerobench.analytic import state_nbytes, total, total_coefficients
from zerobench.checks.check import View, itemsize
from zerobench.checks.memory import formula
from zerobench.claims import Recipe
from zerobench.explain.waterfall import Kind, Steps, Waterfall
from zerobench.record import Holding, Piece, Sample
from zerobench.terms import MODEL_STATES, Category, Moment
from zerobench.units import nbytes_text

GIVEN = "given"
"""What the ledger calls the maker of storages that came with the module."""


def at_rest(view: View) -> Waterfall | None:
    """Live bytes after the last step. None where no rank was watched then."""
    held = {s.rank: (s, h) for s in view.samples if (h := find(s, view.last_step, Moment.STEPPED)) is not None}
    if not held:
        return None
    sample, holding = max(held.values(), key=lambda pair: pair[1].live)
    steps = Steps()
    add_holding(steps, view, sample, holding)
    steps.absent += around_tensors(view)
    return Waterfall(
        view.case.id,
        view.main.id,
        "at rest",
        sample.rank,
        view.psi,
        view.n,
        f"bytes of live tensors after step {view.last_step}, {how(view)} (Holding.live)",
        holding.live,
        steps.close(holding.live),
        tuple(steps.absent),
    )


def find(sample: Sample, step: int, moment: Moment) -> Holding | None:
    return next((h for h in sample.holdings if (h.step, h.moment) == (step, moment)), None)


def how(view: View) -> str:
    return "simulated" if view.main.run.case.simulated else "measured"


def around_tensors(view: View) -> list[str]:
    """What a run that watches tensors only cannot say."""
    where = "a larger model's run (size-1 to size-3), which `conform` makes, or a suite with memory.device"
    if any(s.place.cuda for s in view.samples):
        return [f"allocator rounding, context and communicators: not read in this run; see {where}"]
    return [
        "allocator rounding (requested, allocated, reserved): not measured on a CPU run, which has no such allocator",
        f"context and communicators: what lies around tensors on a CPU is in {where}",
    ]


def add_holding(steps: Steps, view: View, sample: Sample, holding: Holding) -> None:
    """Rows from the paper's formula to `holding.live`; what they do not reach is left for later rows."""
    group = _add_law(steps, view)
    share = state_nbytes(view.recipe, view.stage, view.psi, view.n, view.moments, shard_size=view.claims.shard_size)
    steps.add("frozen parameters", _frozen(view, group), Kind.CLAIM, "ModelFacts.frozen, weights only")
    whole = steps.sum  # what model states should cost, in whole bytes
    for category in MODEL_STATES:
        expected = share[category] + (_frozen(view, group) if category is Category.PARAMETER else 0)
        _add_difference(steps, view, holding, category, expected)
    named = steps.sum - whole
    claimed = sum(holding.claimed.get(c.value, 0) for c in MODEL_STATES)
    steps.add(
        "padding",
        claimed - whole - named,
        Kind.CLAIM,
        f"Holding.claimed against Psi/{group}; Claims.padding_numel allows {view.claims.padding_numel} elements a category",
    )
    for name, nbytes in holding.claimed.items():
        if name not in {c.value for c in MODEL_STATES}:
            steps.add(f"claimed as {name}", nbytes, Kind.MEASURED, f"Holding.claimed[{name!r}]")
    steps.add("one-element tensors", holding.scalars, Kind.MEASURED, "Holding.scalars: step counts and the like")
    _add_unclaimed(steps, view, sample, holding)


def _add_law(steps: Steps, view: View) -> int:
    """The paper's formula, the claimed dtypes, the claimed groups. Returns the ranks that share a copy."""
    psi, n, stage, moments = view.psi, view.n, view.stage, view.moments
    group = view.claims.shard_size or n
    paper = int(total(view.paper_recipe, stage, psi, n, moments))
    law = formula(*total_coefficients(view.paper_recipe, stage, moments), n)
    precision = view.case.precision
    steps.add(
        "formula", paper, Kind.LAW, f"ZeRO paper, stage {int(stage)} in {precision}: {law} at Psi = {psi}, n = {n}"
    )
    claimed = int(total(view.recipe, stage, psi, n, moments))
    steps.add(
        "recipe",
        claimed - paper,
        Kind.CLAIM,
        f"Claims.recipe ({recipe_text(view.recipe)}) costs {formula(*total_coefficients(view.recipe, stage, moments), n)}",
    )
    steps.add(
        "shard groups",
        int(total(view.recipe, stage, psi, n, moments, shard_size=view.claims.shard_size)) - claimed,
        Kind.CLAIM,
        f"Claims.shard_size: states are sharded over {group} of the {n} ranks",
    )
    return group


def recipe_text(recipe: Recipe) -> str:
    master = f"master {recipe.master}" if recipe.master else "no master"
    return f"parameter {recipe.parameter}, gradient {recipe.gradient}, {master}, moments {recipe.moments}"


def _frozen(view: View, group: int) -> int:
    """Bytes of frozen weights a rank, in the parameter's dtype."""
    nbytes = view.model.frozen * itemsize(view.recipe.parameter)
    return -(-nbytes // group) if view.stage.shards(Category.PARAMETER) else nbytes


def _add_difference(steps: Steps, view: View, holding: Holding, category: Category, expected: Fraction) -> None:
    """A row for a category that is off by more than padding."""
    name, recipe = category.value, view.recipe
    width = {
        Category.PARAMETER: itemsize(recipe.parameter),
        Category.GRADIENT: itemsize(recipe.gradient),
        Category.OPTIMIZER: (itemsize(recipe.master) if recipe.master else 0) + view.moments * itemsize(recipe.moments),
    }[category]
    off, slack = holding.claimed.get(name, 0) - expected, (view.claims.padding_numel + 1) * width
    if abs(off) <= slack:
        return
    dtypes = ", ".join(f"{nbytes_text(b)} in {d}" for d, b in holding.dtypes.get(name, {}).items() if b)
    has = f"Holding.claimed[{name!r}] has {nbytes_text(holding.claimed.get(name, 0))}"
    has += f" ({dtypes})" if dtypes else ""
    each = [h.claimed.get(name, 0) for s in view.samples if (h := find(s, holding.step, holding.moment)) is not None]
    if len(each) == view.n and abs(Fraction(sum(each), view.n) - expected) <= slack:
        steps.add(f"uneven shares, {name}", int(off), Kind.MEASURED, f"{has}; the mean over ranks is the claimed share")
    elif category is Category.GRADIENT and off < 0:
        steps.add("gradients not held", int(off), Kind.MEASURED, f"{has} at this moment")
    else:
        where = "beyond" if off > 0 else "short of"
        steps.add(
            f"{name} {where} the claim", int(off), Kind.SURPLUS, f"{has}, the claims give {nbytes_text(expected)}"
        )


def _add_unclaimed(steps: Steps, view: View, sample: Sample, holding: Holding) -> None:
    """Live bytes that no claim covers, by what their content looks like; what cannot be told stays unexplained."""
    seen = find(sample, holding.step, Moment.BACKWARD)
    kept = _kept_gradient(holding, seen)
    made = "Holding.unclaimed: as much of the gradient's bytes, claimed at BACKWARD, is kept and no longer claimed"
    if view.stage.shards(Category.GRADIENT):
        steps.add("gradients kept after the step", kept, Kind.SURPLUS, made)
    else:  # as DDP keeps its buckets
        steps.add("buckets", kept, Kind.BOUND, made)
    left = holding.unclaimed - kept
    labels = _labels(find(sample, view.last_step, Moment.BACKWARD))
    by_look: dict[str, list[Piece]] = defaultdict(list)
    for piece in holding.pieces:
        by_look[piece.looks_like or labels.get((piece.nbytes, piece.by), "")].append(piece)
    unknown = by_look.pop("", [])
    width = max(itemsize(view.recipe.gradient), itemsize(view.recipe.reduce or view.recipe.gradient))
    buckets = 2 * view.bucket_numel() * width
    for look, pieces in sorted(by_look.items()):
        nbytes = sum(p.nbytes for p in pieces)
        left -= nbytes
        made = f"Holding.pieces, {_makers(pieces)}"
        if look == "gradient" and nbytes <= buckets:
            steps.add("buckets", nbytes, Kind.BOUND, f"{made}; two buckets may stay, {nbytes_text(buckets)}")
        else:
            steps.add(f"unclaimed, looks like {look}", nbytes, Kind.SURPLUS, made)
    given = min(left, view.model.buffers_nbytes, sum(p.nbytes for p in unknown if p.by == GIVEN))
    steps.add("buffers", given, Kind.MEASURED, "ModelFacts.buffers_nbytes: the module's own, which came with it")
    if left - given > 0:
        listed = (
            f"{_makers(unknown)}, content not recognised" if unknown else "in none of the pieces that the record lists"
        )
        steps.leads.append(f"{nbytes_text(left - given)} that nobody claims ({listed})")


def _kept_gradient(holding: Holding, seen: Holding | None) -> int:
    """What has become unclaimed since BACKWARD, at most what the claim of the gradient has lost since."""
    if seen is None or seen is holding:
        return 0
    name = Category.GRADIENT.value
    return max(0, min(holding.unclaimed - seen.unclaimed, seen.claimed.get(name, 0) - holding.claimed.get(name, 0)))


def _labels(seen: Holding | None) -> dict[tuple[int, str], str]:
    """What pieces were recognised as, by size and maker: contents are compared once, before the last step."""
    return {(p.nbytes, p.by): p.looks_like for p in seen.pieces if p.looks_like} if seen else {}


def _makers(pieces: list[Piece]) -> str:
    """The makers of pieces, the largest first: "8.73 MB made by aten.empty at zero.py:58"."""
    by: dict[str, int] = defaultdict(int)
    for piece in pieces:
        by[piece.by] += piece.nbytes
    listed = sorted(by.items(), key=lambda item: -item[1])
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(f"{nbytes_text(b)} made by {name}" for name, b in listed[:3]) + more
