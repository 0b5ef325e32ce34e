"""Which bytes of its storage a tensor shows. Counting regions, not tensors, is what makes a kept view visible.

A region is a list of intervals [start, stop) in bytes from the storage's beginning, ascending and apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

Region = list[tuple[int, int]]
T = TypeVar("T", int, float)


def plain(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold `tensor`'s bytes: itself, or what a wrapper subclass (DTensor, ...) or a sparse
    layout is made of. Raises TypeError for a layout that cannot be taken apart."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        held = (getattr(tensor, name) for name in names)  # a DTensor names its mesh too
        return [part for inner in held if isinstance(inner, Tensor) for part in plain(inner)]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    raise TypeError(f"a tensor of layout {tensor.layout} cannot be accounted for")


def region(tensor: Tensor) -> Region:
    """The bytes of its storage that a strided tensor shows, each once (an expanded or overlapping tensor repeats
    some)."""
    if tensor.numel() == 0:
        return []
    item = tensor.itemsize
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((int(stride) * item, int(n)) for stride, n in sides if n > 1 and stride)
    run = item  # the innermost dimensions, as long as they leave no hole
    while dims and dims[0][0] <= run:
        stride, n = dims.pop(0)
        run += stride * (n - 1)
    start = int(tensor.storage_offset()) * item
    steps = product(*(range(0, stride * n, stride) for stride, n in dims))
    return union((start + sum(step), start + sum(step) + run) for step in steps)


def union(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The same points as disjoint half-open intervals, in order."""
    out: list[tuple[T, T]] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def nbytes(covered: Region) -> int:
    return sum(stop - start for start, stop in covered)


def gaps(covered: Region, total: int) -> Region:
    """What `covered` leaves of [0, total)."""
    edges = [0, *(edge for interval in covered for edge in interval), total]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
