"""Chapter 3, continued: features that an implementation may support. Claimed and not working is a failure."""

from __future__ import annotations

from collections.abc import Callable

from zerobench.checks.check import Check, Judgement, NotApplicable, View, ranks_text, verdict
from zerobench.checks.numerics import first_wrong, where
from zerobench.finding import Level
from zerobench.record import Comparison, Sample

Found = list[tuple[str, Comparison, Sample]]


def compared(view: View, *whats: str) -> Found:
    """(scenario, comparison, sample) of these kinds in every run that is there."""
    return [
        (name, c, s)
        for name, record in view.records.items()
        for s in record.samples
        for c in s.comparisons
        if c.what in whats
    ]


def exact(*whats: str) -> Callable[[View], Judgement]:
    """A check that holds where comparisons of these kinds are equal, bit for bit, in every run."""

    def judge(view: View) -> Judgement:
        found = compared(view, *(whats or ("gradient", "parameter")))
        if not found:
            raise NotApplicable("nothing was compared")
        wrong = [item for item in found if item[1].mismatches]
        return _said(view, found, wrong, "the oracle's bits")

    return judge


def bounded(*whats: str) -> Callable[[View], Judgement]:
    """A check that holds where comparisons of these kinds stay within their derived bounds."""

    def judge(view: View) -> Judgement:
        found = compared(view, *whats)
        if not found:
            raise NotApplicable("nothing was compared")
        return _said(view, found, [item for item in found if item[1].worst > 1], "the oracle's values within rounding")

    return judge


def _said(view: View, found: Found, wrong: Found, expected: str) -> Judgement:
    runs = ", ".join(dict.fromkeys(name for name, *_ in found))
    if not wrong:
        return Judgement(verdict(True), verdict(True), expected, f"holds: {runs}")
    name, c, s = first_wrong(wrong)
    a = view.records[name].run.case.micro_batches
    return Judgement(
        verdict(False),
        verdict(False),
        expected,
        f"{name}: {where(c, s, view.records[name].run.case.world_size, a)}",
        ranks=tuple(sorted({s.rank for _, _, s in wrong})),
        detail=tuple(f"{n}: {where(c, s, view.n, a)}" for n, c, s in sorted(wrong, key=_place)[1:3]),
    )


def _place(item: tuple[str, Comparison, Sample]) -> tuple[int, int]:
    return item[1].step, item[2].rank


def master(view: View) -> Judgement:
    """Three steps of updates below half an ulp of the 16-bit weight, in the most precise copy there is."""
    if view.case.precision == "fp32":
        raise NotApplicable("fp32 weights are their own masters")
    return bounded("trajectory")(view)


def clip(view: View) -> Judgement:
    """The reported norm on every rank, and the update, above and below the threshold."""
    norms = {
        (name, r.step): (r.grad_norm, s.rank)
        for name, record in view.records.items()
        for s in record.samples
        for r in s.reports
    }
    for name, record in view.records.items():
        for step in {r.step for s in record.samples for r in s.reports}:
            said = {s.rank: r.grad_norm for s in record.samples for r in s.reports if r.step == step}
            if len(set(said.values())) > 1:
                apart = [r for r, v in said.items() if v != said[0]]
                return Judgement(
                    verdict(False),
                    verdict(False),
                    "one global norm, the same on every rank",
                    f"{name}, step {step}: " + ", ".join(f"rank {r}: {v}" for r, v in sorted(said.items())),
                    ranks=tuple(apart),
                )
    if not norms:
        raise NotApplicable("nothing was reported")
    return bounded("norm", "clipped update")(view)


def overflow(view: View) -> Judgement:
    """At the poisoned step all ranks skip and nothing changes; a dynamic scale falls alike; training goes on."""
    for name, record in view.records.items():
        poisoned = {s.rank: [r for r in s.reports if r.step == 1] for s in record.samples}
        silent = [rank for rank, reports in poisoned.items() if not reports or not reports[0].skipped]
        if silent:
            return _overflow_fails(name, f"{ranks_text(silent, view.n)} did not report a skipped step", tuple(silent))
        others = [r for s in record.samples for r in s.reports if r.step != 1 and r.skipped]
        if others:
            return _overflow_fails(name, f"step {others[0].step} was skipped too, without an overflow", ())
        if name.endswith("dynamic"):
            scales = {s.rank: tuple(r.loss_scale for r in s.reports) for s in record.samples}
            if len(set(scales.values())) > 1:
                told = "; ".join(f"rank {r}: {v}" for r, v in sorted(scales.items()))
                return _overflow_fails(name, f"the ranks' loss scales differ: {told}", ())
            first, last = scales[0][0], scales[0][-1]
            if first is None or last is None or not last < first:
                return _overflow_fails(name, f"the loss scale did not fall: {first} before, {last} after", ())
    return exact("skipped", "parameter", "gradient")(view)


def _overflow_fails(name: str, actual: str, ranks: tuple[int, ...]) -> Judgement:
    expected = "every rank skips the step, reports it, keeps its state, and a dynamic scale falls alike"
    return Judgement(verdict(False), verdict(False), expected, f"{name}: {actual}", ranks=ranks)


def same_bits(view: View) -> Judgement:
    """The whole parameters of two runs of three steps, digest by digest."""
    one, two = (view.records[name] for name in list(view.records)[:2])
    for mine, theirs in zip(one.samples, two.samples, strict=True):
        left = {(d.step, d.what): d.value for d in mine.digests if d.what.startswith("parameter ")}
        right = {(d.step, d.what): d.value for d in theirs.digests if d.what.startswith("parameter ")}
        if not left:
            raise NotApplicable("nothing was digested")
        apart = [key for key in sorted(left) if left[key] != right.get(key)]
        if apart:
            step, what = apart[0]
            return Judgement(
                verdict(False),
                verdict(False),
                "the same bits",
                f"{what} differs first after step {step} between {one.run.scenario} and {two.run.scenario}, "
                f"{len(apart)} of {len(left)} tensors in all",
                ranks=(mine.rank,),
            )
    return Judgement(verdict(True), verdict(True), "the same bits", "equal after every step")


def recompute(view: View) -> Judgement:
    """Activation checkpointing changes no bit, and at stage 3 gathers no more than the claim."""
    from zerobench.checks.traffic import claimed_volume, step_volumes

    word = same_bits(view)
    record = view.records["recompute"]
    assert record.model is not None
    if view.n > 1:
        high = claimed_volume(view, 1) * (record.model.psi + view.padding_total())
        worst = max(step_volumes(record).values())
        if worst > high:
            return Judgement(
                verdict(False),
                verdict(False),
                f"the same bits and volume: {float(high / record.model.psi):.2f} Psi",
                f"{float(worst / record.model.psi):.2f} Psi a step with recomputation",
            )
    return word


def invariance(view: View) -> Judgement:
    """The same job with other buckets, and without overlap: as far as the implementation can be told."""
    if not set(view.records) - {"dyadic"}:
        raise NotApplicable("unsupported: bucket, and no option overlap")
    return exact()(view)


def _row(
    id: str,
    requirement: str,
    formula: str,
    scenarios: tuple[str, ...],
    judge: Callable[[View], Judgement],
    **more: object,
) -> Check:
    level = more.pop("level", Level.MUST)
    kind = more.pop("kind", "==")
    return Check(f"numerics.{id}", level, kind, requirement, formula, scenarios, judge, **more)  # type: ignore[arg-type]


BITWISE = "bitwise on an exact model"

CHECKS = (
    _row(
        "master",
        "updates below half an ulp of the 16-bit weight accumulate",
        "weights after tiny SGD steps, within twice the spread of rounding",
        ("tiny-updates",),
        master,
        kind="<=",
    ),
    _row(
        "accumulation",
        "A micro-batches are one larger batch: at the first, second and third step",
        BITWISE,
        ("dyadic-accumulate-2", "dyadic-accumulate-4"),
        exact(),
        also=("dyadic-caller-accumulate-2",),
    ),
    _row(
        "clip",
        "clipping uses the global norm, the same on every rank: nothing changes below the threshold, all alike above",
        "min(1, max_norm / (norm + 1e-6)), or without the 1e-6; derived roundings",
        ("clip-above", "clip-below"),
        clip,
        kind="<=",
    ),
    _row(
        "overflow",
        "an inf or nan on one rank makes all ranks skip: state unchanged, scale falls alike, the skip is reported",
        BITWISE,
        ("overflow-inf-static", "overflow-nan-dynamic", "overflow-inf-dynamic"),
        overflow,
    ),
    _row("scale", "a power-of-two loss scale cancels exactly", BITWISE, ("scale-static",), exact()),
    _row(
        "moved",
        "a parameter moved, against full_parameters when built, exactly where the oracle's did",
        "weights when built are the job's; moved elements are the oracle's",
        ("dyadic",),
        exact("built", "moved"),
    ),
    _row(
        "edges",
        "right for sizes 1, n-1, n, n+1, around a bucket, Psi < n, one giant tensor",
        BITWISE,
        ("edges-shapes", "edges-giant"),
        exact(),
        also=("edges-tinier",),
    ),
    _row("tied", "tied weights stay tied and get both gradients", BITWISE, ("tied",), exact()),
    _row("unused", "unused parameters neither stall nor drift", BITWISE, ("unused",), exact()),
    _row(
        "groups",
        "each group keeps its own learning rate and weight decay, and a changed rate takes effect",
        BITWISE,
        ("groups",),
        exact(),
        also=("schedule",),
    ),
    _row(
        "buffers",
        "a model with buffers trains right, and its counter counts",
        BITWISE,
        ("buffers",),
        exact("gradient", "parameter", "buffer"),
    ),
    _row(
        "recompute",
        "activation checkpointing changes no bit and gathers nothing twice",
        "digests with and without",
        ("recompute-off", "recompute"),
        recompute,
    ),
    _row(
        "repeat",
        "the same run twice gives the same bits",
        "digests of whole parameters after every step",
        ("repeat-1", "repeat-2"),
        same_bits,
        level=Level.SHOULD,
    ),
    _row(
        "invariance",
        "the bucket size changes nothing, and neither does overlap, on or off",
        BITWISE,
        ("dyadic",),
        invariance,
        also=("bucket-small", "bucket-one", "overlap-off"),
    ),
    _row("race", "still right when ranks come late and freed memory is overwritten", BITWISE, ("race",), exact()),
)
