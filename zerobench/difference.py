"""How far one tensor is from what it should be, and in which way: what a finding needs to say where to look.

Everything is compared as fp64, which holds every fp32, bf16 and fp16 value exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerobench.record import Comparison

SIGNIFICAND = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
"""Bits of significand, the hidden one included: half an ulp of x is at most 2**-p |x|."""

NAMED_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: rounding x to `dtype` (nearest) errs by at most u |x|, away from under- and overflow (Higham 2002, theorem
    2.2)."""
    return float(2.0 ** -SIGNIFICAND[dtype])


def ulps(difference: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """|difference| in units in the last place of `right` as `dtype`; subnormal numbers have the smallest normal's."""
    smallest = torch.finfo(dtype).tiny
    _, exponent = torch.frexp(right.abs().clamp_min(smallest))
    unit = torch.ldexp(torch.ones_like(right), exponent - SIGNIFICAND[dtype])
    return difference.abs() / unit


def compare(
    step: int, what: str, name: str, actual: Tensor, right: Tensor, *, bound: Tensor | None = None, note: str = ""
) -> Comparison:
    """`actual` against `right`, element by element.

    bound: the largest |actual - right| that a correct implementation may show, of right's shape; None where only
    equality is right. `Comparison.worst` is the largest |difference| / bound; infinite where the bound is 0 and the
    difference is not, where a value is not finite on one side only, or where the shapes differ.
    """
    if actual.shape != right.shape:
        note = f"shape {tuple(actual.shape)}, should be {tuple(right.shape)}"
        return Comparison(step, what, name, right.numel(), right.numel(), worst=float("inf"), note=note)
    dtype = actual.dtype if actual.dtype in SIGNIFICAND else torch.float32
    a, b = actual.detach().to(torch.float64).reshape(-1), right.detach().to(torch.float64).reshape(-1)
    same = (a == b) | (a.isnan() & b.isnan())
    wrong = ~same
    mismatches = int(wrong.sum())
    if not mismatches:
        return Comparison(step, what, name, b.numel(), 0, note=note)
    difference = torch.where(same, torch.zeros_like(a), a - b)
    limit = torch.zeros_like(b) if bound is None else bound.to(torch.float64).reshape(-1)
    excess = torch.where(same, torch.zeros_like(a), difference.abs() / limit)
    excess = torch.where(excess.isnan(), torch.full_like(excess, float("inf")), excess)
    return Comparison(
        step,
        what,
        name,
        numel=b.numel(),
        mismatches=mismatches,
        max_abs=float(difference.abs().nan_to_num(nan=float("inf")).max()),
        max_ulp=float(ulps(difference, b, dtype).nan_to_num(nan=float("inf")).max()),
        worst=float(excess.max()),
        factor=constant_factor(a, b),
        first=int(torch.nonzero(wrong)[0]),
        note=note,
    )


def constant_factor(actual: Tensor, right: Tensor) -> float | None:
    """The f for which actual = f right everywhere, to one part in a thousand; None where there is no such f.

    A gradient that is off by n, A or sqrt(n) is a fault of averaging, and the factor names it.
    """
    used = right != 0
    if not bool(used.any()) or not bool(torch.isfinite(actual).all()):
        return None
    ratio = actual[used] / right[used]
    factor = float(ratio.median())
    spread = float((actual - factor * right).abs().max())
    return factor if spread <= 1e-3 * float((factor * right).abs().max()) else None
