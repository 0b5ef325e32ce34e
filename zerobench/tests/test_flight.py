"""What is computed while gradients travel, on real ranks that wait for their collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.implementations.buckets import Bucket
from zerobench.implementations.reference import Zero
from zerobench.judge import judge
from zerobench.launch.local import Local
from zerobench.models import build
from zerobench.mutants.base import Planted
from zerobench.probes.flight import MOST_IN_VAIN, Host, _Held
from zerobench.probes.traffic import Tap
from zerobench.record import Call, Flight, Record, Sample
from zerobench.terms import Collective
from zerobench.tests.made import record as made
from zerobench.tests.ranks import join, run_ranks


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local() as launcher:
        yield launcher


@pytest.mark.parametrize("reference", ["torch-ddp", "zero2", "zerobench.mutants.sends:WaitsAtOnce"])
def test_held_reductions_tell_who_goes_on_from_who_waits(local: Local, reference: str) -> None:
    """Eight equal units, a bucket each: whoever goes on hides all but the reduction of the unit that comes last, after
    which no boundary is left. Who waits hides none."""
    record = local.launch(Case(reference, reference, "gpt-tiny", 2, "bf16").run("flight"), deadline_s=60)
    assert record.status == "ok", record.reason
    for sample in record.samples:
        assert sample.flights is not None
        numel = {flight.weight for flight in sample.flights}
        hidden = [flight.hidden for flight in sample.flights]
        assert len(numel) == 1 and len(hidden) == 8
        assert hidden == ([0.0] * 8 if "Waits" in reference else [1.0] * 7 + [0.0])


def drive(rank: int, n: int, store: str) -> dict[str, Any]:
    """Reductions of a stack's boundaries by hand: through Work.wait, through the future, and by a functional one."""
    tap = Tap()
    tap.install()
    join(rank, n, store)
    model = build("stack-4", world_size=n, micro_batches=1, device="cpu")
    host, waiting, futures = Host(tap, model), [], []
    functional = torch.ops._c10d_functional

    def step(unit: nn.Module, _: Any, gradient: Any) -> None:
        index = list(model.units).index(unit)
        value = torch.full((4,), float(rank + 1))
        if index == 3:
            waiting.append((value, dist.all_reduce(value, async_op=True)))
        elif index == 2:
            futures.append(dist.all_reduce(value, async_op=True).get_future())
        elif index == 1:
            held = functional.all_reduce(value, "sum", dist.group.WORLD.group_name)
            waiting.append((held, None))
        else:
            dist.all_reduce(value)
            waiting.append((value, None))

    for unit in model.units:
        unit.register_full_backward_hook(step)
    sums: list[Tensor] = []
    for last in (False, True):
        waiting.clear()
        futures.clear()
        with host.step(last=last):
            tap.phase = "backward"
            model.module(*model.batch(0, rank, 0)).backward()
            pending = [not work.is_completed() for _, work in waiting if work is not None]
            for value, work in waiting:
                if work is not None:
                    assert work.wait() and work.is_completed() and work.is_success()
                sums.append(functional.wait_tensor(value))
            sums.extend(future.wait()[0] for future in futures)
    return {
        "sums": [s.tolist() for s in sums],
        "hidden": [(f.weight, f.hidden) for f in host.flights or ()],
        "pending": pending,
        "threads": [t.name for t in threading.enumerate() if t.name == "in flight"],
        "around": tap.around,
    }


def test_a_held_work_is_waited_for_in_every_way_and_nothing_stays() -> None:
    for seen in run_ranks(drive, 2):
        assert seen["sums"] == [[3.0] * 4] * 8
        assert seen["hidden"] == [(4.0, 1.0), (4.0, 1.0), (4.0, 1.0), (4.0, 0.0)]
        assert seen["threads"] == [] and seen["around"] is None
        assert seen["pending"] == [False], "its unit was overtaken, and the collective is over"


class Slow(dist.Work):
    """A collective that takes a while, or that fails."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(0.2)
        if self.error:
            raise RuntimeError(self.error)
        return True


def test_it_has_landed_when_the_collective_is_over() -> None:
    held = _Held(Slow(), [torch.ones(2)], patience_s=60.0)
    assert not held.is_completed()
    held.land()
    assert held.is_completed() and not held._thread.is_alive()
    assert held.get_future().wait()[0].tolist() == [1.0, 1.0]


def test_what_a_collective_raises_is_raised_where_it_is_waited_for() -> None:
    held = _Held(Slow("the peer is gone"), [torch.ones(2)], patience_s=0.0)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        held.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        held.get_future().wait()


def patient(rank: int, n: int, store: str) -> dict[str, Any]:
    """Twice as many reductions as are held in vain, each waited for at once."""
    tap = Tap()
    tap.install()
    join(rank, n, store)
    model = build("stack-4", world_size=n, micro_batches=1, device="cpu")
    host = Host(tap, model)

    def all_wait(*_: Any) -> None:
        for _ in range(MOST_IN_VAIN // 2):
            dist.all_reduce(torch.ones(2))

    for unit in model.units:
        unit.register_full_backward_hook(all_wait)
    tap.phase = "backward"
    for last in (False, True):
        with host.step(last=last):
            model.module(*model.batch(0, rank, 0)).backward()
    return {"hidden": [f.hidden for f in host.flights or ()]}


def test_what_is_held_in_vain_is_bounded() -> None:
    for seen in run_ranks(patient, 2):
        assert seen["hidden"] == [0.0] * MOST_IN_VAIN


class RaisesOnTheWay(Planted):
    """Rank 1 raises with a reduction on the way; rank 0 never sends the one after it, and waits for nobody."""

    name = "raises-on-the-way"

    class engine(Zero):
        def _reduce(self, bucket: Bucket) -> None:
            if self._stepped and bucket is self.buckets[4]:
                if dist.get_rank() == 1:
                    super()._reduce(bucket)
                    raise RuntimeError("out of luck")
                time.sleep(600.0)
            super()._reduce(bucket)


def test_who_raises_with_a_reduction_on_the_way_says_so_at_once(local: Local) -> None:
    case = Case("raises", "zerobench.tests.test_flight:RaisesOnTheWay", "gpt-tiny", 2, "bf16")
    record = local.launch(case.run("flight"), deadline_s=30)
    failure = next(sample.failure for sample in record.samples if sample.rank == 1)
    assert failure is not None and (failure.kind, failure.step) == ("raised", 1)
    assert "out of luck" in failure.what
    assert record.wall_s < 25, "before the deadline"


# -- the verdict -------------------------------------------------------------------------------------------------------


def flight(*hidden: float) -> Record:
    """A record of the run `flight` in which each rank hid so much of two equal reductions."""
    own = made("flight")
    samples = [
        replace(s, flights=tuple(Flight(Collective.REDUCE_SCATTER, 8.0, x) for x in (share, share)))
        for s, share in zip(own.samples, hidden, strict=True)
    ]
    return replace(own, samples=tuple(samples))


@pytest.mark.parametrize(
    ("hidden", "status", "ranks", "said"),
    [
        ((0.9, 0.9, 0.9, 0.9), Status.PASS, (), "10% of the time on the way nothing is computed"),
        ((0.02, 0.9, 0.9, 0.9), Status.PASS, (), "98% of the time"),
        ((0.9, 0.009, 0.9, 0.9), Status.FAIL, (1,), "99% of the time on the way nothing is computed on rank 1"),
        (
            (0.0, 0.0, 0.0, 0.0),
            Status.FAIL,
            (0, 1, 2, 3),
            "100% of the time on the way nothing is computed on each rank",
        ),
    ],
)
def test_the_verdict(hidden: tuple[float, ...], status: Status, ranks: tuple[int, ...], said: str) -> None:
    plain, own = made(), flight(*hidden)
    case = plain.run.case
    found = judge("made", [case], ["traffic.overlap"], {plain.id: plain, own.id: own}).findings[0]
    assert (found.status, found.ranks) == (status, ranks)
    assert said in found.actual
    assert any("backward waits" in line for line in found.detail) == (status is Status.FAIL)


def late(sample: Sample) -> Sample:
    return replace(sample, boundaries=tuple(replace(b, calls=0) for b in sample.boundaries))


def test_who_issues_when_backward_is_over_fails_whatever_the_flights() -> None:
    skipped = made("flight", status="skip", reason="unsupported: overlap", samples=())
    for own in (flight(0.9, 0.9, 0.9, 0.9), skipped):
        plain = made(change=late)
        found = judge("made", [plain.run.case], ["traffic.overlap"], {plain.id: plain, own.id: own}).findings[0]
        assert found.status is Status.FAIL
        assert "100% of the elements are sent after the last boundary of backward" in found.actual


def by_all_to_all(sample: Sample) -> Sample:
    """Gradients travel by all-to-all; a vector of norms is reduced when all is over."""
    norms = Call(1, "step", Collective.ALL_REDUCE, 10, 40, "fp32", tuple(range(4)))
    moved = [replace(c, kind=Collective.ALL_TO_ALL) if c.kind.reduces else c for c in sample.calls]
    return replace(sample, calls=(*moved, norms), flights=(Flight(Collective.ALL_REDUCE, 10.0, 0.0),))


@pytest.mark.parametrize("own", [made("flight"), made("flight", change=by_all_to_all)], ids=["nothing", "norms alone"])
def test_what_could_not_be_seen_is_said(own: Record) -> None:
    plain = made()
    found = judge("made", [plain.run.case], ["traffic.overlap"], {plain.id: plain, own.id: own}).findings[0]
    assert found.status is Status.PASS and "could not be seen" in found.actual
