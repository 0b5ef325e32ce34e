"""Figures that follow from a step's seconds: tokens a second, bus bandwidth, and the share of a card's peak (MFU).

**Tokens a second**: tokens of all ranks and micro-batches in a step, over its seconds.

**Bus bandwidth** (nccl-tests, doc/PERFORMANCE.md): what a link would have to carry if the collective were a ring, which
makes worlds of different size comparable. A call on a tensor of S bytes that takes t seconds has bus bandwidth
f S / t, with f = 2(n-1)/n for an all-reduce, (n-1)/n for reduce-scatter, all-gather, all-to-all, gather and scatter,
and 1 for broadcast, reduce and send. A record has no seconds of single collectives; over the seconds of the whole
step the figure is a *lower bound* of what links carried while they were busy.

**MFU**, model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B): 6 Psi FLOPs a token, 2 for the forward's
multiply and add and 4 for the backward's (Kaplan et al., arXiv 2001.08361, section 2.1), over the dense 16-bit peak of
all cards. Attention's own products are left out, and an embedding counts as if it were a matrix: on small models it is
a rough figure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from zerobench.record import Call
from zerobench.terms import Collective

_PEAKS = (
    # card, as the driver names it; TFLOP/s; data sheet
    (r"B200", 2250.0, "NVIDIA HGX B200 data sheet, half of the figure with sparsity"),
    (r"H200", 989.5, "NVIDIA H200 data sheet, SXM, half of the figure with sparsity"),
    (r"H100 80GB HBM3", 989.5, "NVIDIA H100 data sheet, SXM, half of the figure with sparsity"),
    (r"H100 PCIe", 756.5, "NVIDIA H100 data sheet, PCIe, half of the figure with sparsity"),
    (r"A100[- ].*", 312.0, "NVIDIA A100 data sheet"),
    (r"A30", 165.0, "NVIDIA A30 data sheet"),
    (r"A10", 125.0, "NVIDIA A10 data sheet"),
    (r"L40S", 362.05, "NVIDIA L40S data sheet"),
    (r"L4", 121.0, "NVIDIA L4 data sheet, half of the figure with sparsity"),
    (r"V100-SXM2.*", 125.0, "NVIDIA V100 data sheet, SXM2; fp16 only"),
    (r"T4", 65.0, "NVIDIA T4 data sheet; fp16 only"),
)


@dataclass(frozen=True)
class Peak:
    """The dense 16-bit tensor-core peak of one card. flops: FLOP/s. source: where the figure stands."""

    card: str
    flops: float
    source: str


def tokens_per_second(tokens: int, micro_batches: int, n: int, seconds: float) -> float:
    """tokens: of one rank and micro-batch. Raises ValueError where no time has passed."""
    return tokens * micro_batches * n / _positive(seconds)


def bus_factor(kind: Collective, n: int) -> Fraction:
    """Bytes that cross the bus, over the bytes of the full tensor, in a group of n ranks: nccl-tests' factors."""
    if n <= 1 or not kind.ring_passes:
        return Fraction(0)
    if kind in (Collective.BROADCAST, Collective.REDUCE, Collective.SEND):
        return Fraction(1)
    return Fraction(kind.ring_passes * (n - 1), n)


def bus_bandwidth(calls: Iterable[Call], seconds: float) -> dict[Collective, float]:
    """Bytes a second by kind, of one rank's calls in `seconds`; kinds that send nothing are left out."""
    given: Counter[tuple[Collective, int]] = Counter()
    for call in calls:
        given[call.kind, len(call.group)] += call.nbytes
    nbytes: dict[Collective, Fraction] = {}
    for (kind, size), total in given.items():
        if crossed := total * bus_factor(kind, size):
            nbytes[kind] = nbytes.get(kind, Fraction(0)) + crossed
    return {kind: float(total) / _positive(seconds) for kind, total in nbytes.items()}


def peak_of(card: str, precision: str) -> Peak | None:
    """The peak of a card by the driver's name for it; None where it is not listed, and for a part of a card (MIG).

    precision: "bf16" or "fp16"; for any other there is no 16-bit peak to compare with.
    """
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", card.strip())
    for pattern, tera, source in _PEAKS:
        if re.fullmatch(pattern, name) and "MIG" not in name:
            old = "fp16 only" in source
            return Peak(card, tera * 1e12, source) if precision == "fp16" or (precision == "bf16" and not old) else None
    return None


def step_flops(psi: int, tokens: int) -> int:
    """6 Psi FLOPs a token, forward and backward. tokens: of the whole step, all ranks."""
    return 6 * psi * tokens


def mfu(psi: int, tokens: int, seconds: float, peak: Peak, n: int) -> float:
    """The share of n cards' peak that a step of `tokens` (all ranks) used. Raises ValueError where no time has
    passed."""
    return step_flops(psi, tokens) / _positive(seconds) / (n * peak.flops)


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"a step of {seconds} s")
    return seconds
