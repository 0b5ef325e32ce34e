"""gloo's cost model against the kernel's counters, for each kind whose cost it claims to know."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerobench.gloo import framing_nbytes, received_nbytes
from zerobench.probes import wire
from zerobench.probes.tapcheck import _gather, _scatter
from zerobench.probes.traffic import Tap
from zerobench.record import Call
from zerobench.terms import Collective as K
from zerobench.tests.ranks import join, run_ranks

LARGE = 1 << 21  # elements


def measure(rank: int, n: int, store: str) -> list[tuple[str, Call | None, int, int]]:
    """(collective, its call, what the model says, what the sockets received) for each kind, on several sizes."""
    tap = Tap()
    tap.install()
    join(rank, n, store)
    rows = []
    for share, dtype in (
        (-(-LARGE // n), torch.float32),
        (-(-LARGE // n) + 1, torch.bfloat16),
        (1000, torch.float32),
        (1, torch.bfloat16),
    ):
        for name, issue in kinds(rank, n, share, dtype).items():
            dist.barrier()
            before = wire.read()
            tap.calls.clear()
            try:
                issue()
            except RuntimeError as error:
                if "does not support" not in str(error):  # torch 2.11's gloo has no all-to-all of a list
                    raise
                continue
            calls = list(tap.calls)
            dist.barrier()
            moved = wire.difference(before, wire.read(), 1)
            # At least one to each peer; what is judged is bytes.
            assert moved is not None and moved.sockets >= n - 1, moved
            expected = [received_nbytes(call, rank) for call in calls]
            # Headers of the barriers on both sides may arrive inside the window.
            allowed = sum(framing_nbytes(call, n) for call in [*calls, *tap.calls[-1:] * 2])
            assert all(e is not None for e in expected), name
            rows.append((f"{name} of {share * n} {dtype}", sum(expected), allowed, moved.received_nbytes))  # type: ignore
    return rows  # type: ignore[return-value]


def kinds(rank: int, n: int, share: int, dtype: torch.dtype) -> dict[str, Any]:
    whole, out = torch.zeros(share * n, dtype=dtype), torch.zeros(share * n, dtype=dtype)
    part, parts, outs = torch.zeros(share, dtype=dtype), list(whole.chunk(n)), list(out.chunk(n))
    root, last = rank == 0, n - 1

    def ring() -> None:
        right, left = dist.P2POp(dist.isend, whole, (rank + 1) % n), dist.P2POp(dist.irecv, out, (rank - 1) % n)
        for work in dist.batch_isend_irecv([right, left]):
            work.wait()

    def uneven() -> None:
        """Rank r gets r + 1 shares from each: the last rank receives n times what rank 0 does."""
        splits = [share * (i + 1) for i in range(n)]
        given, got = torch.zeros(sum(splits), dtype=dtype), torch.zeros(share * (rank + 1) * n, dtype=dtype)
        dist.all_to_all_single(got, given, [share * (rank + 1)] * n, splits)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: _scatter(part, whole),
        "reduce_scatter of a list": lambda: dist.reduce_scatter(part, parts),
        "all_gather": lambda: _gather(whole, part),
        "all_gather to a list": lambda: dist.all_gather(outs, part),
        "all_to_all": lambda: dist.all_to_all_single(out, whole),
        "all_to_all of a list": lambda: dist.all_to_all(outs, parts),
        "uneven all_to_all": uneven,
        "broadcast": lambda: dist.broadcast(whole, 0),
        "broadcast from the last": lambda: dist.broadcast(whole, last),
        "gather": lambda: dist.gather(part, outs if root else None, 0),
        "scatter": lambda: dist.scatter(part, parts if root else None, 0),
        "ring of sends": ring,
        "barrier": dist.barrier,
    }


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sockets_receive_what_the_model_says_within_framing(n: int) -> None:
    for rows in run_ranks(measure, n):
        assert len(rows) >= 4 * 13, "one kind at most may be refused"
        for name, expected, allowed, received in rows:
            assert abs(received - expected) <= allowed, (
                f"{name}: model {expected}, sockets {received}, framing {allowed}"
            )
            if expected > 1 << 20:
                assert allowed < expected / 200, f"{name}: the allowance is too wide to close anything"


def call(kind: K, n: int, root: int | None = None) -> Call:
    return Call(0, "step", kind, 600, 1200, "bf16", tuple(range(10, 10 + n)), root)


def test_a_ring_of_one_and_a_stranger_receive_nothing() -> None:
    for kind in K:
        assert received_nbytes(call(kind, 1, 10), 10) == 0
        assert framing_nbytes(call(kind, 1, 10), 1) == 0
        assert received_nbytes(call(kind, 3, 10), 0) == 0


def test_the_cost_of_a_reduce_is_not_known_and_roots_differ_from_the_rest() -> None:
    assert received_nbytes(call(K.REDUCE, 3, 10), 11) is None
    assert [received_nbytes(call(K.BROADCAST, 3, 11), r) for r in (10, 11, 12)] == [1200, 0, 1200]
    assert [received_nbytes(call(K.SCATTER, 3, 11), r) for r in (10, 11, 12)] == [400, 0, 400]
    assert [received_nbytes(call(K.GATHER, 3, 11), r) for r in (10, 11, 12)] == [0, 800, 0]
    assert received_nbytes(call(K.ALL_REDUCE, 7), 10) == Fraction(2 * 6 * 1200, 7)
