"""Whole tensors from pieces: what each rank holds of a flattened tensor, in the order of ranks, even or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor

from zerobench.implementations.collectives import all_gather


def joined(piece: Tensor) -> Tensor:
    """Collective: the pieces of all ranks behind each other, (sum of their elements,). They have one dtype."""
    n = dist.get_world_size()
    sizes = torch.empty(n, dtype=torch.int64)
    all_gather(sizes, torch.tensor([piece.numel()]), n).wait()
    largest = int(sizes.max())
    if not largest:
        return piece.new_empty(0)
    padded = piece.new_zeros(largest)  # not every backend gathers unequal parts
    padded[: piece.numel()] = piece.detach().reshape(-1)
    every = piece.new_empty(n * largest)
    all_gather(every, padded, n).wait()
    return torch.cat([row[:numel] for row, numel in zip(every.view(n, largest), sizes.tolist(), strict=True)])


def joined_states(states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Size]) -> dict[str, dict[str, Tensor]]:
    """Collective: every optimizer state, whole, for the parameters in `shapes`.

    states: by parameter, this rank's pieces of its moments and its scalars (a step count). A rank without a piece may
    have nothing of a parameter, the scalars included: any rank's are then taken.
    """
    mine = {
        name: {key: value if value.dim() == 0 else value.dtype for key, value in state.items() if _is_tensor(value)}
        for name, state in states.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    out: dict[str, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        kinds: dict[str, Any] = {}
        for theirs in everyone:
            kinds |= theirs.get(name, {})
        out[name] = {}
        for key, kind in sorted(kinds.items()):
            if _is_tensor(kind):
                out[name][key] = kind
            else:
                piece = states.get(name, {}).get(key)
                out[name][key] = joined(torch.empty(0, dtype=kind) if piece is None else piece).view(shape)
    return out


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
