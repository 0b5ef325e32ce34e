"""The tap counts what is issued, once, whoever issues it; what it does not know it names."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.judge import judge, plan
from zerobench.launch.local import Local
from zerobench.probes.tapcheck import _scatter
from zerobench.probes.traffic import _ROWS, Tap, dtype_name
from zerobench.record import Call
from zerobench.terms import Collective as K
from zerobench.tests.faults.bench import FAULTY
from zerobench.tests.ranks import join, run_ranks

Facts = tuple[str, int, str]


def tapped(rank: int, n: int, store: str) -> Tap:
    tap = Tap()
    tap.install()
    join(rank, n, store)
    assert tap.self_test("cpu") == []
    tap.calls.clear()
    return tap


def facts(calls: list[Call]) -> list[Facts]:
    return [(c.kind.value, c.numel, c.dtype) for c in calls]


def issue_all(rank: int, n: int, store: str) -> dict[str, Any]:
    tap = tapped(rank, n, store)
    seen: dict[str, Any] = {}

    def note(name: str) -> None:
        seen[name] = facts(tap.calls)
        tap.calls.clear()

    w = torch.zeros(4 * n, dtype=torch.bfloat16)
    dist.all_reduce(w, async_op=True).wait()
    note("async bf16 all-reduce")
    with dist._coalescing_manager():
        for t in (torch.zeros(3 * n), torch.zeros(5 * n)):
            _scatter(torch.zeros(t.numel() // n), t)
    note("coalesced reduce-scatter")
    x = functional.all_gather_tensor(torch.zeros(3), 0, dist.group.WORLD)
    x = functional.reduce_scatter_tensor(torch.zeros(2 * n) + x.sum(), "sum", 0, dist.group.WORLD)
    _ = x.sum()
    note("functional")
    splits = [1, 2, 3][:n]
    received = [splits[rank]] * n
    dist.all_to_all_single(torch.zeros(sum(received)), torch.zeros(sum(splits)), received, splits)
    seen["uneven received"] = tap.calls[0].received_numel
    note("uneven all-to-all")
    dist.broadcast_object_list([{"a": 1} if rank == 0 else None], 0)
    seen["objects"] = [c.kind.value for c in tap.calls]
    tap.calls.clear()
    dist._broadcast_coalesced(dist.group.WORLD, [torch.zeros(3), torch.zeros(4)], 1 << 20, 0)
    note("C++ broadcast")
    dist.monitored_barrier()
    note("monitored barrier")

    group = dist.new_group([n - 1, 0])
    tap.calls.clear()
    if rank in (0, n - 1):
        dist.broadcast(torch.zeros(2), n - 1, group=group)
        seen["subgroup"] = (tap.calls[0].group, tap.calls[0].root)
        tap.calls.clear()

    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    tap.calls.clear()
    net(torch.zeros(2, 8)).sum().backward()
    note("ddp")
    return seen


@pytest.mark.parametrize("n", [2, 3])
def test_each_way_of_issuing_counts_once(n: int) -> None:
    for rank, seen in enumerate(run_ranks(issue_all, n)):
        assert seen["async bf16 all-reduce"] == [("all-reduce", 4 * n, "bf16")]
        assert seen["coalesced reduce-scatter"] == [("reduce-scatter", 8 * n, "fp32")]
        assert seen["functional"] == [("all-gather", 3 * n, "fp32"), ("reduce-scatter", 2 * n, "fp32")]
        assert seen["uneven all-to-all"] == [("all-to-all", sum([1, 2, 3][:n]), "fp32")]
        own = rank + 1
        received = own * (n - 1)
        assert seen["uneven received"] == (None if received * n == sum([1, 2, 3][:n]) * (n - 1) else received)
        assert set(seen["objects"]) == {"broadcast"}
        assert seen["C++ broadcast"] == [("broadcast", 7, "fp32")]
        assert seen["monitored barrier"] == [("barrier", 0, "")]
        assert seen["ddp"] == [("all-reduce", 72, "fp32")]
        if rank in (0, n - 1):
            assert seen["subgroup"] == (tuple(sorted({0, n - 1})), n - 1)


def issue_marked(rank: int, n: int, store: str) -> dict[str, Any]:
    tap = tapped(rank, n, store)
    heard: list[Call] = []
    pending: list[bool] = []
    tap.on_call = lambda call: (heard.append(call), pending.append(bool(x.any())))
    x = torch.ones(2) if rank == 0 else torch.zeros(2)
    tap.step, tap.phase = 3, "backward"
    dist.broadcast(x, 0)
    with tap.paused():
        dist.all_reduce(x)
    worker = threading.Thread(target=lambda: dist.all_reduce(x), name="overlapper")
    worker.start()
    worker.join()
    problems, seconds = [], []
    for _ in range(3):
        started = time.process_time()
        problems += tap.self_test("cpu")
        seconds.append(time.process_time() - started)
    return {
        "marks": [(c.step, c.phase, c.by) for c in tap.calls],
        "heard": facts(heard)[:3] == facts(tap.calls),
        "before": pending[0],
        "problems": problems,
        "seconds": min(seconds),
    }


def test_calls_carry_step_phase_and_thread_and_are_announced_before_they_are_issued() -> None:
    for rank, seen in enumerate(run_ranks(issue_marked, 2)):
        assert seen["marks"] == [(3, "backward", "main"), (3, "read", "main"), (3, "backward", "overlapper")]
        assert seen["heard"]
        assert seen["before"] == (rank == 0), "the receiving rank must be heard of while its tensor is still empty"
        assert seen["problems"] == []
        assert seen["seconds"] < 0.05, "it runs in every case"


def issue_unknown(rank: int, n: int, store: str) -> dict[str, Any]:
    row = _ROWS.pop("broadcast_")
    tap = Tap()
    tap.install()
    join(rank, n, store)
    dist.broadcast(torch.zeros(2), 0)
    named = list(tap.unknown)
    self_test = tap.self_test("cpu")
    tap.uninstall()
    dist.all_reduce(torch.zeros(2))
    after = len(tap.calls)
    _ROWS["broadcast_"] = row
    again = Tap()
    again.install()
    return {"named": named, "self_test": self_test, "after": after, "again": again.self_test("cpu")}


def test_an_operator_without_a_row_is_named_and_the_self_test_finds_it() -> None:
    (seen,) = run_ranks(issue_unknown, 1)
    assert len(seen["named"]) == 1 and "c10d::broadcast_" in seen["named"][0]
    assert any("broadcast" in problem for problem in seen["self_test"])
    assert seen["after"] == 0, "an uninstalled tap still counts"
    assert seen["again"] == []


def self_test_blind(rank: int, n: int, store: str) -> list[str]:
    tap = Tap()
    tap.install()
    join(rank, n, store)
    tap._see = lambda *_: None  # type: ignore[method-assign]
    return tap.self_test("cpu")


def test_the_self_test_of_a_blind_tap_fails() -> None:
    (problems,) = run_ranks(self_test_blind, 1)
    assert any("nothing at all" in p for p in problems)


def sparse(rank: int, n: int, store: str) -> list[str]:
    tap = tapped(rank, n, store)
    dist.all_reduce(torch.eye(3).to_sparse())
    return tap.unknown


def test_a_sparse_payload_is_refused() -> None:
    (unknown,) = run_ranks(sparse, 1)
    assert len(unknown) == 1 and "sparse" in unknown[0]


def test_the_table_names_every_collective_and_dtypes_have_the_recipes_words() -> None:
    assert {row.kind for row in _ROWS.values()} == set(K)
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float32, torch.int64)] == ["bf16", "fp32", "int64"]


def test_two_groups_of_the_same_ranks_are_two_communicators() -> None:
    """Ranks that use them the other way round are in order on each of them."""
    case = Case("faulty", FAULTY, "mlp-tiny", 2, options={"fault": "two-groups", "at": "step"})
    with Local() as local:
        records = {id: local.launch(run, deadline_s=60) for id, run in plan([case], ["traffic.order"]).items()}
    calls = [c for r in records.values() for c in r.samples[0].calls if c.numel in (3, 7)]
    assert len({c.communicator for c in calls} - {""}) == 2
    found = {f.check: f for f in judge("s", [case], ["traffic.order"], records).findings}
    assert found["traffic.order"].status is Status.PASS, found["traffic.order"].actual
