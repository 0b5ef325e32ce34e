"""The collectives of ZeRO, over the default process group. With one rank each is a copy, and nothing is sent.

All are asynchronous: call `wait` on the result before the output is read or an input is reused.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both; the old names warn there, the new ones do not exist in 2.11.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class Done:
    """One that needed nobody else."""

    def wait(self) -> None:
        return None


def all_reduce(whole: Tensor, n: int) -> Work:
    """Sum `whole` over the ranks, in place."""
    if n == 1:
        return Done()
    return dist.all_reduce(whole, async_op=True)  # type: ignore[no-any-return]


def reduce_scatter(part: Tensor, whole: Tensor, n: int) -> Work:
    """Sum `whole` (n parts) over the ranks and leave part r on rank r. `part` may be that part of `whole` itself."""
    if n == 1:
        part.copy_(whole)
        return Done()
    return _reduce_scatter(part, whole, async_op=True)  # type: ignore[no-any-return]


def all_gather(whole: Tensor, part: Tensor, n: int) -> Work:
    """Fill `whole` with the ranks' parts, in order. `part` may be this rank's part of `whole` itself."""
    if n == 1:
        whole.copy_(part)
        return Done()
    return _all_gather(whole, part, async_op=True)  # type: ignore[no-any-return]


def broadcast(tensor: Tensor, n: int) -> Work:
    """Give every rank what rank 0 has, in place."""
    if n == 1:
        return Done()
    return dist.broadcast(tensor, 0, async_op=True)  # type: ignore[no-any-return]


def barrier(n: int) -> None:
    """Wait until every rank is here."""
    if n > 1:
        dist.barrier()
