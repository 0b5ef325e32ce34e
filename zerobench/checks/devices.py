"""What the device and its driver see, against what the ledger and the traffic log say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from zerobench import nccl
from zerobench.checks.check import Check, Judgement, NotApplicable, Unreliable, View, ranks_text, verdict
from zerobench.finding import Level
from zerobench.record import Record
from zerobench.terms import Moment
from zerobench.units import nbytes_text

SIZES = ("size-1", "size-2", "size-3")
TOLERANCE = 0.02
"""By how much two slopes that count the same bytes may differ: an instrument of whole pages, blocks or segments is off
by up to one of them at each end, and the smallest step between sizes is larger than fifty of them."""
HOST_TOLERANCE = 0.25
"""For the resident set, whose pages the heap keeps and shares out as it likes: it tells twice from once, no more."""

SMALLEST_COPY = 2
"""Bytes an element of the least that could hide: a 16-bit copy of one shard, 2/n bytes a parameter."""
UNSEEN = 0.25
"""Of that copy, what malloc may hold beside tensors, and hold more of in a larger model: objects of torch, of gloo and of
the interpreter, a few for every parameter and message, whose weight does not shrink with n as the shards do. A copy is
four times as much as is let through."""

PAIRS = {
    # witness: (what it is held against, tolerance)
    "malloc": ("ledger", TOLERANCE),
    "rss": ("ledger", HOST_TOLERANCE),
    "requested": ("ledger", TOLERANCE),
    "nvml": ("reserved", TOLERANCE),
}
ON_CPU, ON_GPU = ("malloc", "rss"), ("requested", "nvml")


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Bytes a parameter: least squares of bytes over Psi."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def device(view: View) -> Judgement:
    """On each rank, the slope over Psi of every witness against that of what it should see, in the last step.

    A backend's threads keep a collective's buffers for a moment after it is over, so single readings may be high. What
    the ledger does not know is there at every moment: the moment counts, the same at every size, at which the slopes are
    closest.
    """
    records = [r for r in view.records.values() if r.model is not None]
    sizes = {r.model.psi for r in records if r.model}
    if len(sizes) < 3:
        raise NotApplicable(f"needs at least three sizes of model, has {len(sizes)}")
    gpu = any(s.place.cuda for s in view.samples)
    rows: list[_Slopes] = []
    missing: dict[str, str] = {}
    for witness in ON_GPU if gpu else ON_CPU:
        for rank in range(view.n):
            found = [_readings(r, rank, witness, PAIRS[witness][0]) for r in records]
            if why := next((word for word in found if isinstance(word, str)), ""):
                missing[witness] = why
                continue
            by_moment = [f for f in found if not isinstance(f, str)]
            slopes = []
            for moment in set.intersection(*(set(f) for f in by_moment)):
                points = [(r.model.psi, *f[moment]) for r, f in zip(records, by_moment, strict=True) if r.model]
                seen, right = slope([(x, w) for x, w, _ in points]), slope([(x, a) for x, _, a in points])
                more = UNSEEN * SMALLEST_COPY / view.n if witness == "malloc" else 0.0
                slopes.append(_Slopes(witness, rank, seen, right, more))
            if slopes:
                rows.append(min(slopes, key=lambda row: row.excess))
    if not rows:
        raise NotApplicable("; ".join(f"{w}: {why}" for w, why in missing.items()))
    wrong = [row for row in rows if row.excess > 1]
    worst = max(rows, key=lambda row: row.excess)
    named = ", ".join(f"{row.witness} {row.seen:.2f}" for row in rows if row.rank == worst.rank)
    witnesses = dict.fromkeys(row.witness for row in rows)
    return Judgement(
        claim=verdict(not wrong),
        paper=verdict(not wrong),
        expected=", ".join(
            f"{w} as {PAIRS[w][0]} within {PAIRS[w][1]:.0%}"
            + (f", or up to {UNSEEN * SMALLEST_COPY / view.n:.2g} bytes a parameter more" if w == "malloc" else "")
            for w in witnesses
        ),
        actual=f"{named} bytes a parameter on rank {worst.rank}, where {PAIRS[worst.witness][0]} grows by "
        f"{worst.right:.2f} (Psi = {', '.join(map(str, sorted(sizes)))})",
        ranks=tuple(sorted({row.rank for row in wrong})),
        detail=(
            *(f"{r.witness}: {r.seen:.2f} bytes a parameter on rank {r.rank}, should be {r.right:.2f}" for r in wrong),
            *(f"{w} not judged: {why}" for w, why in missing.items()),
            _waterfall(records, worst.rank),
        ),
        metrics=tuple((f"{row.witness}_slope", row.seen) for row in rows if row.rank == worst.rank),
    )


@dataclass(frozen=True)
class _Slopes:
    """Bytes a parameter that a witness saw on a rank, and that it should have seen. more: what it may see beyond that in
    any case."""

    witness: str
    rank: int
    seen: float
    right: float
    more: float

    @property
    def excess(self) -> float:
        """The difference in units of what is tolerated."""
        tolerated = PAIRS[self.witness][1] * self.right
        if self.seen > self.right:
            tolerated = max(tolerated, self.more)
        return abs(self.seen - self.right) / tolerated if self.right else float("inf")


def _readings(record: Record, rank: int, witness: str, against: str) -> dict[tuple[int, Moment], tuple[int, int]] | str:
    """(witness's bytes, those that it should see) by step and moment; or why there are none."""
    sample, why = record.samples[rank], "the system's view was not taken"
    found: dict[tuple[int, Moment], tuple[int, int]] = {}
    live = {(h.step, h.moment): h.live for h in sample.holdings}
    for resident in sample.residents:
        seen, inner = resident.level(witness), resident.level(against)
        ledger = live.get((resident.step, resident.moment))
        right = ledger if against == "ledger" else inner.raw if inner else None
        if seen is None or seen.raw is None or right is None:
            why = seen.why if seen is not None and seen.why else why
            continue
        found[resident.step, resident.moment] = (seen.raw, right)
    return found or why


def _waterfall(records: Sequence[Record], rank: int) -> str:
    """Level by level at the largest size: what was read, what the reference process had, what is between."""
    record = max(records, key=lambda r: r.model.psi if r.model else 0)
    resident = next((r for r in record.samples[rank].residents if r.moment is Moment.BACKWARD), None)
    levels = [v for v in resident.levels if v.raw is not None] if resident else []
    listed = [
        f"{v.instrument} {nbytes_text(v.raw or 0)}"
        + (f" - {nbytes_text(v.baseline)}" if v.baseline is not None else "")
        for v in levels
    ]
    psi = record.model.psi if record.model else 0
    return f"at Psi = {psi}, less the reference process: {', '.join(listed)}"


def nvlink_closure(view: View) -> Judgement:
    """The bytes that the GPUs' NVLinks sent, against the log by NCCL's cost on a ring."""
    lines, wrong, worst = [], [], Fraction(0)
    for sample in view.samples:
        links = sample.links
        if links is None:
            raise NotApplicable("the GPU's counters were not read: NVML is not open")
        if others := nccl.deviations(links.settings):
            raise NotApplicable(f"NCCL's settings are not the canonical ones: {', '.join(others)}")
        if links.nvlink_sent is None:
            raise NotApplicable(
                f"no NVLink count: {links.why.get('nvlink_sent', 'not read')}; PCIe carries batches and commands too"
            )
        calls = [c for c in sample.calls if c.step in view.measured_steps]
        costs = {c: nccl.sent_nbytes(c, sample.rank) for c in set(calls)}
        if unknown := sorted({c.kind.value for c, cost in costs.items() if cost is None}):
            raise NotApplicable(f"what NCCL sends for {', '.join(unknown)} is not known")
        model = sum((costs[c] or Fraction(0) for c in calls), Fraction(0))
        gap = abs(links.nvlink_sent - model)
        if gap > max(Fraction(5, 1000) * model, Fraction(links.links * nccl.COUNTER_NBYTES)):
            wrong.append(sample.rank)
        worst = max(worst, Fraction(gap, model) if model else Fraction(0))
        lines.append(f"rank {sample.rank}: NVLink {nbytes_text(links.nvlink_sent)}, log {nbytes_text(model)}")
    if wrong:
        raise Unreliable(
            f"the links carried what the log does not explain on {ranks_text(wrong, view.n)}, {float(worst):.2%} at "
            f"worst: {'; '.join(lines)}"
        )
    return Judgement(
        verdict(True),
        verdict(True),
        "within 0.5 % or the counters' unit",
        f"{float(worst):.3%} unexplained at worst",
        detail=tuple(lines),
        metrics=(("unexplained", float(worst)),),
    )


CHECKS = (
    Check(
        "memory.device",
        Level.SHOULD,
        "within",
        "over three sizes of model, what the allocator and the driver (or the kernel) see grows as the ledger does",
        "slopes over Psi: malloc, RSS as the ledger; on CUDA requested bytes as the ledger, NVML as reserved bytes",
        SIZES,
        device,
    ),
)
