"""The global norm of a gradient that lies in parts on many ranks, and what clipping makes of it.

Ranks add the squares of what they own, so that each element counts once; the root is taken of the sum over all ranks. A
norm of local norms averaged, or of one rank's part, is another number (too small by about sqrt(n), and different on
each rank).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 2**16
"""Elements that are converted to fp64 at a time: no copy of a whole bucket, and the piece stays in a core's cache."""


def sum_of_squares(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of all elements: 0-dim, fp64. Not finite if and only if an element is not.

    fp64 holds the square of any fp32 number and the sum of as many as fit in a memory, so that one number answers both
    questions that a step has: how long is the gradient, and did it overflow.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        for piece in torch.split(flat, PIECE):
            wide = piece.double()
            total += wide @ wide
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it: one number for the whole gradient."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
