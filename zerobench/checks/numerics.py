"""Chapter 3: what is computed, against the oracle. The worker compared; here it is judged."""

from __future__ import annotations

import math
from collections import defaultdict

from zerobench.checks.check import Check, Judgement, NotApplicable, View, ranks_text, verdict
from zerobench.finding import Level
from zerobench.record import Comparison, Sample


def gradient(view: View) -> Judgement:
    """Reduced gradients equal the oracle's, bit for bit, on the dyadic model."""
    return _exact(view, "gradient")


def update(view: View) -> Judgement:
    """Weights after each SGD step with momentum equal the oracle's, bit for bit, on the dyadic model."""
    return _exact(view, "parameter")


def adam(view: View) -> Judgement:
    """Each Adam step from the state before it, within the derived bound."""
    return _bounded(
        view, "adam", "textbook Adam within its rounding bound, for weights, both moments and the step count"
    )


def loss(view: View) -> Judgement:
    """Losses and weights of five free steps, SGD and Adam, beside DDP's arithmetic."""
    found = [
        (name, c, s)
        for name, record in view.records.items()
        for s in record.samples
        for c in s.comparisons
        if c.what in ("loss", "trajectory")
    ]
    if not found:
        raise NotApplicable("nothing was compared")
    exact = view.case.precision == "fp32" and view.n * view.main.run.case.micro_batches <= 2
    wrong = [(name, c, s) for name, c, s in found if c.worst > 1]
    bitwise = all(not c.mismatches for _, c, _ in found)
    first = min(wrong, key=lambda item: item[1].step, default=None)
    worst = max((c.worst for _, c, _ in found), default=0.0)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected="five steps of SGD with momentum and of Adam as DDP trains"
        + (
            " (n A <= 2 in fp32: the same bits, if the same kernels run)"
            if exact
            else ", within the spread of rounding"
        ),
        actual="the same bits"
        if bitwise
        else f"{worst:.2f} of the bound at worst"
        if first is None
        else f"{first[0]}: {where(first[1], first[2], view.n)}",
        ranks=tuple(sorted({s.rank for _, _, s in wrong})),
        metrics=(("worst", worst), ("bitwise", float(bitwise))),
    )


def sync(view: View) -> Judgement:
    """What the stage keeps whole has the same bits on every rank, after build and after every step."""
    if view.n == 1:
        raise NotApplicable("one rank has nobody to disagree with")
    seen: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
    for record in view.records.values():
        for sample in record.samples:
            for d in sample.digests:
                if d.nbytes:
                    seen[d.step, f"{d.what} ({record.run.scenario})"][sample.rank] = d.value
    if not seen:
        raise NotApplicable("the claimed stage replicates nothing")
    for (step, what), by_rank in sorted(seen.items()):
        if len(set(by_rank.values())) > 1:
            reference = by_rank[min(by_rank)]
            apart = tuple(r for r, v in sorted(by_rank.items()) if v != reference)
            return Judgement(
                verdict(False),
                verdict(False),
                "the same bits on every rank",
                f"{what} differs first {'after build' if step < 0 else f'after step {step}'}: "
                f"{ranks_text(apart, view.n + 1)} from rank {min(by_rank)}",
                ranks=apart,
            )
    steps = len({step for step, _ in seen})
    return Judgement(verdict(True), verdict(True), "the same bits on every rank", f"equal at {steps} moments")


# -- parts -------------------------------------------------------------------------------------------------------------


def factor_text(factor: float, n: int, a: int) -> str:
    """A constant factor in words: which of n, A, their product and their roots it is."""
    for name, value in (("n", n), ("A", a), ("n A", n * a), ("sqrt(n)", math.sqrt(n)), ("sqrt(A)", math.sqrt(a))):
        if value > 1 and math.isclose(factor, value, rel_tol=2e-3):
            return f"{factor:.4g} times what is right: too large by {name}"
        if value > 1 and math.isclose(factor, 1 / value, rel_tol=2e-3):
            return f"{factor:.4g} times what is right: too small by {name}"
    return f"{factor:.4g} times what is right"


def where(c: Comparison, sample: Sample, n: int, a: int = 1) -> str:
    """Where a comparison fails first: step, tensor, index, rank, by how much."""
    at = f"{c.what} of {c.name} at step {c.step} on rank {sample.rank}"
    if c.note:
        return f"{at}: {c.note}"
    how = f"{c.mismatches} of {c.numel} elements differ, first at [{c.first}], by up to {c.max_abs:.3g} ({c.max_ulp:.3g} ulp)"
    if c.factor is not None and not math.isclose(c.factor, 1, rel_tol=1e-3):
        how += f"; {factor_text(c.factor, n, a)}"
    return f"{at}: {how}"


def first_wrong(wrong: list[tuple[str, Comparison, Sample]]) -> tuple[str, Comparison, Sample]:
    """The earliest step, then the lowest rank."""
    return min(wrong, key=lambda item: (item[1].step, item[2].rank))


def _exact(view: View, what: str) -> Judgement:
    found = [(c, s) for s in view.samples for c in s.comparisons if c.what == what]
    if not found:
        raise NotApplicable("nothing was compared")
    wrong = [(c, s) for c, s in found if c.mismatches]
    a = view.main.run.case.micro_batches
    steps = sorted({c.step for c, _ in found})
    tensors = len({c.name for c, _ in found})
    detail = tuple(where(c, s, view.n, a) for c, s in sorted(wrong, key=lambda i: (i[0].step, i[1].rank))[1:4])
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=f"the oracle's bits: mean over n A = {view.n * a} micro-batches",
        actual=where(*min(wrong, key=lambda i: (i[0].step, i[1].rank)), view.n, a)
        if wrong
        else f"equal: {tensors} tensors, steps {steps[0]}-{steps[-1]}",
        ranks=tuple(sorted({s.rank for _, s in wrong})),
        detail=detail,
    )


def _bounded(view: View, prefix: str, expected: str) -> Judgement:
    found = [(c, s) for s in view.samples for c in s.comparisons if c.what.startswith(prefix)]
    if not found:
        raise NotApplicable("nothing was compared")
    wrong = [(c, s) for c, s in found if c.worst > 1]
    worst = max(c.worst for c, _ in found)
    detail = tuple(where(c, s, view.n) for c, s in sorted(wrong, key=lambda i: (i[0].step, i[1].rank))[1:4])
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=expected,
        actual=where(*min(wrong, key=lambda i: (i[0].step, i[1].rank)), view.n)
        if wrong
        else f"{worst:.2f} of the bound at worst",
        ranks=tuple(sorted({s.rank for _, s in wrong})),
        detail=detail,
        metrics=(("worst", worst),),
    )


CHECKS = (
    Check(
        "numerics.gradient",
        Level.MUST,
        "==",
        "the reduced gradient is the mean over all n A micro-batches",
        "bitwise the oracle's on the dyadic model",
        ("dyadic",),
        gradient,
    ),
    Check(
        "numerics.update",
        Level.MUST,
        "==",
        "weights after each SGD step with momentum are the oracle's, with different data on each rank",
        "bitwise on the dyadic model",
        ("dyadic",),
        update,
    ),
    Check(
        "numerics.adam",
        Level.MUST,
        "<=",
        "each Adam step follows the textbook from the implementation's own state before it",
        "derived roundings, see oracle.adam_step",
        ("adam",),
        adam,
    ),
    Check(
        "numerics.loss",
        Level.MUST,
        "<=",
        "losses and weights over five steps are DDP's",
        "bitwise where n A <= 2 in fp32, else within twice the spread of twins whose roundings are the largest allowed",
        ("trajectory-sgd", "trajectory-adam"),
        loss,
    ),
    Check(
        "numerics.sync",
        Level.MUST,
        "==",
        "what the stage keeps whole has the same bits on all ranks, after build and after every step",
        "digests by rank",
        ("plain",),
        sync,
        also=("apart",),
    ),
)
