"""Chapter 2: what a rank sends, in elements on a ring, from the log beneath every library."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from fractions import Fraction
from itertools import zip_longest

from zerobench import gloo
from zerobench.analytic import evaluate_volume, sent_numel, volume
from zerobench.checks.check import (
    SUBJECT_PHASES,
    Check,
    Judgement,
    NotApplicable,
    Unreliable,
    View,
    is_control,
    payload,
    per_psi,
    ranks_text,
    verdict,
)
from zerobench.checks.devices import nvlink_closure
from zerobench.finding import Level
from zerobench.record import Call, Record
from zerobench.terms import Category, Collective
from zerobench.units import nbytes_text

CLOSURE_PSI = 2_000_000
"""Below this many parameters message headers are no longer small beside the payload, and the wire proves nothing."""


def sent(calls: Iterable[Call], n: int) -> Fraction:
    """Elements that the callers sent on a ring, in units where one pass over S elements among all n ranks counts S.

    A rank's own calls, or several ranks' together: what is rooted is shared out by dividing the sum by n.
    """
    if n <= 1:
        return Fraction(0)
    numel: Counter[tuple[Collective, int]] = Counter()
    for call in calls:
        numel[call.kind, len(call.group)] += call.numel
    passed = (v * kind.wire_factor(size) for (kind, size), v in numel.items())
    return sum(passed, Fraction(0)) / Fraction(n - 1, n)


def claimed_volume(view: View, a: int) -> Fraction:
    """Ring passes over Psi that the implementation claims for a step of `a` micro-batches."""
    claims = view.claims
    if claims.volume is not None:
        return evaluate_volume(claims.volume, a)
    if claims.shard_size is not None and view.n > 1:
        each = sent_numel(
            claims.stage,
            1,
            view.n,
            a,
            gathered=claims.gathered,
            reduce_each=claims.reduce_each,
            shard_size=claims.shard_size,
        )
        return sum(each.values(), Fraction(0)) / Fraction(view.n - 1, view.n)
    return volume(claims.stage, a, gathered=claims.gathered, reduce_each=claims.reduce_each)


def step_volumes(record: Record) -> dict[int, Fraction]:
    """Ring passes a step, mean over ranks, in elements, by measured step."""
    case = record.run.case
    n = case.world_size
    assert record.model is not None
    return {
        step: sum((sent(payload(s.calls, [step], record.model), n) for s in record.samples), Fraction(0))
        / len(record.samples)
        for step in range(case.warmup, case.warmup + case.measured)
    }


def _judge_volume(view: View, record: Record) -> tuple[bool, bool, Fraction, Fraction, Fraction]:
    """(claim holds, paper holds, claimed passes, paper's passes, worst measured elements)."""
    a = record.run.case.micro_batches
    assert record.model is not None
    psi, pad = record.model.psi, view.padding_total()
    claimed, paper = claimed_volume(view, a), volume(view.stage, a)
    steps = step_volumes(record).values()
    low, high = claimed * psi, claimed * (psi + pad)
    worst = max(steps, key=lambda v: max(low - v, v - high))
    holds = all(low <= v <= high for v in steps)
    return holds, all(v <= paper * (psi + pad) for v in steps), claimed, paper, worst


def volume_(view: View) -> Judgement:
    """Ring elements a rank and step."""
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1 (traffic.single judges that)")
    claim, paper, claimed, stage_passes, worst = _judge_volume(view, view.main)
    a, n, psi = view.main.run.case.micro_batches, view.n, view.psi
    calls, numel = _control(view)
    detail = [_sum_text(view)]
    if calls:
        detail.append(f"control traffic beside it: at most {calls} calls and {numel} elements a rank and step")
    return Judgement(
        claim=verdict(claim),
        paper=verdict(paper),
        expected=f"{_number(claimed)} Psi x (n-1)/n elements a rank and step (A = {a}, n = {n})"
        + (
            f"; the paper's stage {int(view.stage)} sends {_number(stage_passes)} Psi"
            if claimed != stage_passes
            else ""
        ),
        actual=f"{per_psi(worst, psi)} x (n-1)/n = {int(worst * (n - 1) / n)} elements (Psi = {psi})",
        detail=tuple(detail),
        metrics=(("passes", float(worst) / psi), ("elements", float(worst * (n - 1) / n))),
    )


def kinds(view: View) -> Judgement:
    """From stage 1 on no all-reduce leaves a whole gradient on every rank."""
    if not view.stage.shards(Category.OPTIMIZER):
        raise NotApplicable("DDP keeps whole gradients")
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    shard = view.claims.shard_size or view.n
    offending: Counter[tuple[str, str, int]] = Counter()
    for sample in view.samples[:1]:
        for call in payload(sample.calls, view.measured_steps, view.model):
            across_replicas = (
                shard < view.n and len(call.group) <= view.n // shard and call.numel <= -(-view.psi // shard) * 2
            )
            if call.kind is Collective.ALL_REDUCE and not across_replicas:
                offending[call.phase, call.dtype, len(call.group)] += call.numel
    steps = len(view.measured_steps)
    listed = [f"{per_psi(Fraction(v, steps), view.psi)} of {d} in {p}" for (p, d, _), v in sorted(offending.items())]
    own = volume(view.stage, view.main.run.case.micro_batches)
    admits = view.claims.volume is not None and claimed_volume(view, view.main.run.case.micro_batches) > own
    return Judgement(
        claim=verdict(not offending or admits),
        paper=verdict(not offending),
        expected="gradients by reduce-scatter, reduce to the owner, or all-to-all",
        actual="all-reduce of " + ", ".join(listed) + " a step" if offending else _kinds_text(view),
        detail=(f"the claimed volume, {view.claims.volume}, admits it",) if offending and admits else (),
    )


def accumulation(view: View) -> Judgement:
    """The volume as a function of A."""
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    rows = []
    for record in view.records.values():
        claim, paper, claimed, _, worst = _judge_volume(view, record)
        assert record.model is not None
        rows.append((record.run.case.micro_batches, claim, paper, claimed, float(worst) / record.model.psi))
    rows.sort()
    return Judgement(
        claim=verdict(all(r[1] for r in rows)),
        paper=verdict(all(r[2] for r in rows)),
        expected=", ".join(f"{_number(r[3])} Psi at A = {r[0]}" for r in rows),
        actual=", ".join(f"{r[4]:.2f} Psi at A = {r[0]}" for r in rows),
        metrics=tuple((f"passes_A{r[0]}", r[4]) for r in rows),
    )


def order(view: View) -> Judgement:
    """The members of each group issue the same sequence."""
    if view.n == 1:
        raise NotApplicable("one rank has nobody to disagree with")
    sequences: dict[tuple[tuple[int, ...], str], dict[int, list[Call]]] = defaultdict(dict)
    for sample in view.samples:
        for call in sample.calls:
            if call.kind not in (Collective.SEND, Collective.RECV):
                sequences[call.group, call.communicator].setdefault(sample.rank, []).append(call)
    checked = 0
    for (group, communicator), by_rank in sorted(sequences.items()):
        members = [by_rank.get(r, []) for r in group]
        for place, calls in enumerate(zip_longest(*members)):
            checked += 1
            issued = {(c.kind, c.numel, c.dtype, c.root) if c else None for c in calls}
            if len(issued) > 1:
                told = "; ".join(f"rank {r}: {_call_text(c)}" for r, c in zip(group, calls, strict=True))
                return Judgement(
                    verdict(False),
                    verdict(False),
                    "the same kind, elements, dtype and root on every member, call by call",
                    f"call {place} of group {','.join(map(str, group))}{f' ({communicator})' if communicator else ''} "
                    f"differs: {told}",
                    ranks=group,
                )
    return Judgement(
        verdict(True), verdict(True), "the same sequence on every member of each group", f"{checked} calls agree"
    )


def closure(view: View) -> Judgement:
    """The bytes that the sockets received, against the log by the backend's cost model."""
    if view.n == 1:
        raise NotApplicable("nothing is sent at n = 1")
    if view.psi < CLOSURE_PSI:
        raise NotApplicable(f"judged from Psi = {CLOSURE_PSI} on; this model has {view.psi}")
    if any(s.place.backend == "nccl" for s in view.samples):
        return nvlink_closure(view)
    lines, worst, wrong = [], Fraction(0), []
    for sample in view.samples:
        if sample.wire is None:
            raise NotApplicable("this machine shows no byte counts of its sockets")
        calls = [c for c in sample.calls if c.step in view.measured_steps]
        costs = {c: gloo.received_nbytes(c, sample.rank) for c in set(calls)}
        unknown = sorted({c.kind.value for c, cost in costs.items() if cost is None})
        if unknown:
            raise NotApplicable(f"what gloo sends for {', '.join(unknown)} is not known")
        model = sum((costs[c] or Fraction(0) for c in calls), Fraction(0))
        framing = sum(gloo.framing_nbytes(c, view.n) for c in calls)
        gap = sample.wire.received_nbytes - model
        if abs(gap) > max(Fraction(5, 1000) * model, Fraction(framing)):
            wrong.append(sample.rank)
        worst = max(worst, Fraction(abs(gap), model) if model else Fraction(0))
        lines.append(f"rank {sample.rank}: wire {nbytes_text(sample.wire.received_nbytes)}, log {nbytes_text(model)}")
    if wrong:
        raise Unreliable(
            f"the wire carried what the log does not explain on {ranks_text(wrong, view.n)}, "
            f"{float(worst):.2%} at worst: {'; '.join(lines)}"
        )
    return Judgement(
        verdict(True),
        verdict(True),
        "within 0.5 % or the messages' headers",
        f"{float(worst):.3%} unexplained at worst",
        detail=tuple(lines),
        metrics=(("unexplained", float(worst)),),
    )


# -- parts -------------------------------------------------------------------------------------------------------------


def _control(view: View) -> tuple[int, int]:
    """(calls, elements) of control traffic, the most that a rank issued in one measured step."""
    calls: Counter[tuple[int, int]] = Counter()
    numel: Counter[tuple[int, int]] = Counter()
    for sample in view.samples:
        for c in sample.calls:
            if c.step in view.measured_steps and c.phase in SUBJECT_PHASES and is_control(c, view.model):
                calls[sample.rank, c.step] += 1
                numel[sample.rank, c.step] += c.numel
    return max(calls.values(), default=0), max(numel.values(), default=0)


def _kinds_text(view: View) -> str:
    seen = Counter(c.kind for c in payload(view.samples[0].calls, view.measured_steps, view.model))
    return (
        ", ".join(f"{kind.value} x {count}" for kind, count in sorted(seen.items(), key=lambda i: i[0].value)) or "none"
    )


def _sum_text(view: View) -> str:
    """What rank 0 sent in the last step, by kind and dtype."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for call in payload(view.samples[0].calls, [view.last_step], view.model):
        sums[call.kind.value, call.dtype] += call.numel
    listed = [f"{kind} {per_psi(v, view.psi)} of {dtype}" for (kind, dtype), v in sorted(sums.items())]
    return "rank 0, last step: " + (", ".join(listed) or "nothing")


def _call_text(call: Call | None) -> str:
    if call is None:
        return "nothing"
    return f"{call.kind.value} of {call.numel} {call.dtype} in {call.phase} of step {call.step}"


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}"


CHECKS = (
    Check(
        "traffic.volume",
        Level.MUST,
        "==",
        "a step moves what the stage needs: 2 Psi (0-1), (A+1) Psi (2), 3 A Psi (3), times (n-1)/n",
        "sum of ring passes x elements; an all-reduce counts two",
        ("plain",),
        volume_,
        simulated="ranks",
    ),
    Check(
        "traffic.kinds",
        Level.MUST,
        "==",
        "from stage 1 on no collective leaves a whole reduced gradient on every rank",
        "no all-reduce of more than one element, but of a shard across replicas",
        ("plain",),
        kinds,
        simulated="ranks",
    ),
    Check(
        "traffic.accumulation",
        Level.MUST,
        "==",
        "the volume as a function of A is the claimed one",
        "DDP and stage 1: 2 Psi; stage 2: (A+1) Psi; stage 3: 3 A Psi",
        ("plain", "accumulate-2", "accumulate-4"),
        accumulation,
        simulated="ranks",
    ),
    Check(
        "traffic.order",
        Level.MUST,
        "==",
        "the members of each group issue the same sequence of collectives",
        "kind, elements, dtype, root, call by call",
        ("plain",),
        order,
        simulated="world",
    ),
    Check(
        "traffic.closure",
        Level.MUST,
        "within",
        "the wire agrees with the log",
        "|wire - cost model of the log| <= max(0.5 %, headers), from Psi = 2M on; NCCL: NVLink, canonical settings",
        ("wire",),
        closure,
    ),
)
