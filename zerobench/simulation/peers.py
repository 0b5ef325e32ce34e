"""The peers that are not there: torch's "fake" process group, and handles of collectives that are already over.

A collective of fake tensors changes nothing but is issued all the same, so the tap sees it where it sees every other.
What comes back says that it is done and, as a real backend's does, holds the tensors: DDP's reducer reads its buckets
from there. Between real tensors (sizes, order of parameters: see `control`) the group copies what this rank gives to
where the others' would be, as if all ranks were alike.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from zerobench.rank import RankContext

BACKEND = "fake"


def join(context: RankContext) -> None:
    """Make this process rank `context.rank` of a default group of `context.world_size`, alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group(BACKEND, store=FakeStore(), rank=context.rank, world_size=context.world_size)


def issued(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a `c10d` operator: its tensors, and a collective that is over."""
    fake = any(isinstance(t, FakeTensor) for t in _tensors(args))
    try:
        # Fake ones go through the fake mode, to kernels that touch no memory. The tap stands before either.
        with nullcontext() if fake else no_dispatch():
            out = func(*args, **kwargs)
    except NotImplementedError:
        if "coalesced" not in str(func):  # these have no kernel for tensors without memory, and return the handle alone
            raise
        return _over(list(_tensors(args)))
    if isinstance(out, (tuple, list)):
        *given, _ = out
        return type(out)([*given, _over(list(_tensors(given)))])
    return out


def functional(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a functional collective, by its C++ kernel, which makes the output and calls `c10d` itself."""
    return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _over(tensors: list[Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
