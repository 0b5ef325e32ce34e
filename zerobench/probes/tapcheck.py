"""The tap's self-test: one tiny collective of each kind, and what the tap must have counted.

The tap stands on private API of torch; a torch that has changed it must make the run invalid, not the log empty.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerobench.terms import Collective as K

if TYPE_CHECKING:
    from zerobench.probes.traffic import Tap

Expected = list[tuple[K, int, str]]  # (kind, numel, dtype) of each call, in order

# Renamed in torch 2.13; the old names still work there, with a warning.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def self_test(tap: Tap, device: torch.device) -> list[str]:
    """See `Tap.self_test`. Whether a backend refuses a kind must not depend on the rank, or the ranks part ways
    here."""
    problems = [f"the tap does not see {schema}" for schema in tap.untapped()]
    world = tuple(range(dist.get_world_size()))
    before, unknown = len(tap.calls), len(tap.unknown)
    for name, expected, issue in _trials(dist.get_rank(), len(world), device):
        start = len(tap.calls)
        thread = "tap-self-test" if name == "all-reduce from a thread" else "main"
        try:
            issue()
        except RuntimeError as error:
            # The backend has no such collective; every backend has this one, so there the tap is at fault.
            if name == "all-reduce":
                problems.append(f"{name}: {error}")
            continue
        seen = tap.calls[start:]
        if [(c.kind, c.numel, c.dtype) for c in seen] != expected:
            counted = [(c.kind.value, c.numel, c.dtype) for c in seen]
            problems.append(f"{name}: issued {[(k.value, n, d) for k, n, d in expected]}, the tap counted {counted}")
        elif any(c.group != world for c in seen):
            problems.append(f"{name}: ran on ranks {world}, the tap saw {[c.group for c in seen]}")
        elif any(c.by != thread for c in seen):
            problems.append(f"{name}: issued by thread {thread}, the tap saw {[c.by for c in seen]}")
    if len(tap.calls) == before:
        problems.append("the tap counted nothing at all")
    problems.extend(tap.unknown[unknown:])
    del tap.calls[before:], tap.unknown[unknown:]
    return problems


def issue_all(device: torch.device) -> None:
    """One tiny collective of each kind that the backend has, counted by nobody. Collective."""
    for _, _, issue in _trials(dist.get_rank(), dist.get_world_size(), device):
        with contextlib.suppress(RuntimeError):
            issue()


def _trials(rank: int, n: int, device: torch.device) -> list[tuple[str, Expected, Callable[[], Any]]]:
    """(name, what must be counted, the call). Tensors of n and 2 n elements."""
    whole = torch.zeros(2 * n, device=device)
    part = torch.zeros(2, device=device)
    half = torch.zeros(2 * n, device=device, dtype=torch.bfloat16)
    pieces = list(whole.chunk(n))
    out = [torch.zeros_like(p) for p in pieces]
    root = rank == 0

    def from_thread() -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(whole), name="tap-self-test")
        thread.start()
        thread.join()

    def exchange() -> None:
        there = dist.P2POp(dist.isend, whole, (rank + 1) % n)
        back = dist.P2POp(dist.irecv, torch.zeros_like(whole), (rank - 1) % n)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    def call(kind: K, numel: int = 2 * n, dtype: str = "fp32") -> Expected:
        return [(kind, numel, dtype)]

    trials: list[tuple[str, Expected, Callable[[], Any]]] = [
        ("all-reduce", call(K.ALL_REDUCE), lambda: dist.all_reduce(whole)),
        ("all-reduce in bf16", call(K.ALL_REDUCE, dtype="bf16"), lambda: dist.all_reduce(half)),
        ("all-reduce from a thread", call(K.ALL_REDUCE), from_thread),
        (
            "functional all-reduce",
            call(K.ALL_REDUCE),
            lambda: _functional(whole),
        ),
        ("reduce-scatter", call(K.REDUCE_SCATTER), lambda: _scatter(part, whole)),
        ("reduce-scatter of a list", call(K.REDUCE_SCATTER), lambda: dist.reduce_scatter(part, pieces)),
        ("all-gather", call(K.ALL_GATHER), lambda: _gather(whole, part)),
        ("all-gather to a list", call(K.ALL_GATHER), lambda: dist.all_gather(out, part)),
        ("all-to-all", call(K.ALL_TO_ALL), lambda: dist.all_to_all_single(torch.zeros_like(whole), whole)),
        ("all-to-all of a list", call(K.ALL_TO_ALL), lambda: dist.all_to_all(out, pieces)),
        ("reduce", call(K.REDUCE), lambda: dist.reduce(whole, 0)),
        ("broadcast", call(K.BROADCAST), lambda: dist.broadcast(whole, 0)),
        ("gather", call(K.GATHER), lambda: dist.gather(part, out if root else None, 0)),
        ("scatter", call(K.SCATTER), lambda: dist.scatter(part, pieces if root else None, 0)),
        ("coalesced all-reduce", call(K.ALL_REDUCE, 2 * n + 2), lambda: _coalesced([whole, part])),
        ("barrier", [(K.BARRIER, 0, "")], dist.barrier),
    ]
    if n > 1:
        trials.append(("send and receive", call(K.SEND) + call(K.RECV), exchange))
    return trials


def _functional(tensor: torch.Tensor) -> None:
    # The operators, not torch.distributed._functional_collectives: that loads the compiler, which takes seconds.
    group = dist.group.WORLD
    assert group is not None
    operators = torch.ops._c10d_functional
    operators.wait_tensor(operators.all_reduce(tensor, "sum", group.group_name))


def _coalesced(tensors: list[torch.Tensor]) -> None:
    # Not torch's coalescing manager: one that a backend refuses leaves every later collective of the group unissued.
    group = dist.group.WORLD
    assert group is not None
    group.allreduce_coalesced(tensors).wait()
