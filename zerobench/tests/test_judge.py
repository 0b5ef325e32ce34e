"""Verdicts from records alone: right ones pass, each wrong one fails the check that speaks of it, and nothing is
lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.checks.check import View
from zerobench.checks.runtime import completes
from zerobench.finding import Finding, Status, Verdict
from zerobench.judge import judge, plan
from zerobench.record import Call, Digest, Failure, Record, Sample
from zerobench.terms import Collective, Moment, Stage
from zerobench.tests.made import CASE, CLAIMS, PSI, N, record

Change = Callable[[Sample], Sample]


def findings(check: str, *records: Record, by: str = "claim", case: Case = CASE, **more: object) -> list[Finding]:
    verdict = judge("made", [case], [check], {r.id: r for r in records}, by=by, **more)  # type: ignore[arg-type]
    return [f for f in verdict.findings if f.check == check]


def status(check: str, *records: Record, by: str = "claim", case: Case = CASE) -> Status:
    return findings(check, *records, by=by, case=case)[0].status


PLAIN = [c.id for c in CHECKS.values() if c.scenarios == ("plain",) and c.over == "case" and not c.also]


@pytest.mark.parametrize("check", PLAIN)
def test_a_correct_record_fails_nothing(check: str) -> None:
    assert status(check, record()) in (Status.PASS, Status.SKIP)
    assert status(check, record(), by="paper") in (Status.PASS, Status.SKIP)


def bytes_more(category: str, by: int, rank: int | None = None) -> Change:
    def change(s: Sample) -> Sample:
        if rank is not None and s.rank != rank:
            return s
        held = [replace(h, claimed={**h.claimed, category: h.claimed[category] + by}) for h in s.holdings]
        return replace(s, holdings=tuple(held))

    return change


def unclaimed(nbytes: int) -> Change:
    return lambda s: replace(s, holdings=tuple(replace(h, unclaimed=nbytes) for h in s.holdings))


def growing(s: Sample) -> Sample:
    return replace(s, holdings=tuple(replace(h, live=h.live + h.step) for h in s.holdings))


def transient(nbytes: int) -> Change:
    return lambda s: replace(s, boundaries=tuple(replace(b, live=b.live + nbytes) for b in s.boundaries))


def sent_as(kind: Collective, dtype: str = "bf16") -> Change:
    def change(s: Sample) -> Sample:
        return replace(
            s, calls=tuple(replace(c, kind=kind, dtype=dtype) if c.phase == "backward" else c for c in s.calls)
        )

    return change


def once_more(s: Sample) -> Sample:
    return replace(s, calls=(*s.calls, s.calls[-1]))


def alone(s: Sample) -> Sample:
    odd = Call(3, "step", Collective.ALL_GATHER, 8, 16, "bf16", tuple(range(N)))
    return replace(s, calls=(*s.calls, odd)) if s.rank == 2 else s


def apart(s: Sample) -> Sample:
    return replace(s, digests=tuple(replace(d, value="other") if d.step == 2 and s.rank == 3 else d for d in s.digests))


def twice(s: Sample) -> Sample:
    return replace(s, updated_numel=2 * PSI // N)


def in_dtype(name: str) -> Change:
    return lambda s: replace(s, holdings=tuple(replace(h, dtypes={"optimizer": {name: 9}}) for h in s.holdings))


@pytest.mark.parametrize(
    ("check", "change", "said"),
    [
        ("memory.at_rest", bytes_more("optimizer", 1), "optimizer: 14.4 kB over all ranks, should be 14.4 kB (+4 B"),
        ("memory.at_rest", bytes_more("gradient", -2), "gradient: 2.39 kB over all ranks, should be 2.4 kB (-8 B"),
        ("memory.unclaimed", unclaimed(2 * 2 * 900 + 1), "3.6 kB = 3.00 Psi"),
        ("memory.gradient_peak", transient(3700), "after block"),
        ("memory.balance", bytes_more("optimizer", 1000, rank=1), "rank 1"),
        ("memory.dtype", in_dtype("bf16"), "optimizer in bf16"),
        ("traffic.volume", once_more, "3.00 Psi"),
        ("traffic.kinds", sent_as(Collective.ALL_REDUCE), "all-reduce of 1.00 Psi of bf16 in backward"),
        ("traffic.dtype", sent_as(Collective.REDUCE_SCATTER, "fp32"), "reduce-scatter in backward of fp32"),
        ("traffic.order", alone, "rank 2: all-gather of 8 bf16 in step of step 3"),
        ("work.sharded", twice, f"{2 * PSI} over all ranks"),
    ],
)
def test_each_wrong_record_fails_its_check_and_says_where(check: str, change: Change, said: str) -> None:
    found = findings(check, record(change=change))[0]
    assert found.status is Status.FAIL
    assert said in " ".join([found.actual, *found.detail])


def test_rest_that_grows_is_found_in_any_run() -> None:
    right, evaluated = record(), record("evaluation", change=growing)
    skipped = record("overflow-memory", status="skip", reason="unsupported: overflow_skip", samples=())
    assert status("memory.rest_returns", right, record("evaluation"), skipped) is Status.PASS
    found = findings("memory.rest_returns", right, evaluated, skipped)[0]
    assert found.status is Status.FAIL and "(evaluation)" in found.actual


def test_what_the_stage_replicates_must_agree_on_all_ranks() -> None:
    absent = record("apart", status="skip", reason="unsupported: broadcast_init", samples=())
    found = findings("numerics.sync", record(change=apart), absent)[0]
    assert found.status is Status.FAIL
    assert found.ranks == (3,) and "after step 2" in found.actual


@pytest.mark.parametrize(
    ("factor", "words"),
    [(4.0, "too large by n"), (0.25, "too small by n"), (2.0, "too large by sqrt(n)"), (3.0, "3 times")],
)
def test_a_constant_factor_is_named(factor: float, words: str) -> None:
    def scaled(s: Sample) -> Sample:
        wrong = [replace(c, mismatches=9, factor=factor, first=0) if c.what == "gradient" else c for c in s.comparisons]
        return replace(s, comparisons=tuple(wrong))

    found = findings("numerics.gradient", record("dyadic", change=scaled))[0]
    assert found.status is Status.FAIL and words in found.actual


def test_the_two_verdicts_differ_where_an_implementation_claims_more_volume() -> None:
    honest = record(claims=replace(CLAIMS, volume="3"), change=sent_as(Collective.ALL_REDUCE))
    assert status("traffic.volume", honest) is Status.PASS
    assert status("traffic.volume", honest, by="paper") is Status.FAIL
    assert status("traffic.kinds", honest) is Status.PASS
    assert status("traffic.kinds", honest, by="paper") is Status.FAIL


def test_the_stage_is_identified_whatever_is_claimed() -> None:
    cases = [replace(CASE, world_size=n) for n in (1, 2, 4)]

    def at(case: Case) -> Record:
        n = case.world_size
        claimed = {"parameter": 2 * PSI, "gradient": 2 * PSI, "optimizer": 12 * PSI // n}
        return record(
            case=case,
            change=lambda s: replace(s, holdings=tuple(replace(h, claimed=claimed) for h in s.holdings)),
        )

    verdict = judge("made", cases, ["memory.scaling"], {r.id: r for r in map(at, cases)}, by="claim")
    found = next(f for f in verdict.findings if f.check == "memory.scaling")
    assert found.case == "zero2/gpt-tiny/n*/bf16"
    assert found.status is Status.FAIL
    assert "claims stage 2" in found.expected and "4.00 Psi + 12.00 Psi/n: stage 1" in found.actual


def test_a_run_that_did_not_end_fails_and_the_other_checks_say_so() -> None:
    died = record(
        status="error",
        reason="rank 1 died",
        change=lambda s: replace(
            s, failure=Failure("died", "SIGKILL", "backward", 2, last_call="all-gather") if s.rank == 1 else None
        ),
    )
    verdict = judge("made", [CASE], ["memory.at_rest"], {died.id: died}, by="paper")
    by_check = {f.check: f for f in verdict.findings}
    assert by_check["runtime.completes"].status is Status.FAIL
    assert "rank 1 died in backward of step 2: SIGKILL" in by_check["runtime.completes"].actual
    assert by_check["memory.at_rest"].status is Status.SKIP
    assert verdict.exit_code() == 1


def test_every_run_that_failed_is_named() -> None:
    """One crash must not hide another: of runs that fail for reasons of their own the first is told, all are named."""

    def fallen(scenario: str) -> Record:
        return record(
            scenario, status="error", change=lambda s: replace(s, failure=Failure("raised", f"in {scenario}"))
        )

    view = View(CASE, {r.run.scenario: r for r in (fallen("plain"), fallen("accumulate-2"), record("wire"))})
    assert completes(view).actual.endswith("raised: in plain; 2 of 3 runs fail: plain, accumulate-2")


def test_a_missing_record_is_never_silence() -> None:
    verdict = judge("made", [CASE], ["memory.at_rest"], {}, by="paper")
    assert {f.status for f in verdict.findings} == {Status.ERROR}
    assert verdict.exit_code() == 3


def test_an_instrument_that_failed_its_self_test_decides_nothing() -> None:
    invalid = record(status="invalid", reason="the traffic tap's self-test: ...")
    assert status("traffic.volume", invalid) is Status.INVALID


def test_excuses_turn_failures_and_stale_ones_fail() -> None:
    excuse = {"check": "traffic.volume", "implementation": ["zero2"], "world_size": [4], "reason": "known"}
    wrong, right = record(change=once_more), record()
    assert findings("traffic.volume", wrong, excuses=[excuse])[0].status is Status.XFAIL
    stale = findings("traffic.volume", right, excuses=[excuse])
    assert stale[0].status is Status.XPASS and Verdict(tuple(stale)).exit_code() == 1
    elsewhere = {**excuse, "world_size": [2]}
    assert findings("traffic.volume", wrong, excuses=[elsewhere])[0].status is Status.FAIL


def test_a_fault_of_our_own_is_an_error_and_not_a_verdict() -> None:
    broken = record(model=None)
    found = findings("memory.at_rest", broken)[0]
    assert found.status is Status.ERROR and "zerobench's own fault" in found.actual


def test_runs_are_shared_between_cases_and_done_once() -> None:
    cases = [CASE, replace(CASE, model="mlp-tiny")]
    runs = plan(cases, ["memory.at_rest", "numerics.gradient", "numerics.update"])
    assert [r.id for r in runs.values()] == [
        "zero2/gpt-tiny/n4/bf16@plain",
        "zero2/dyadic/n4/bf16@dyadic",
        "zero2/mlp-tiny/n4/bf16@plain",
    ]


def test_padding_beyond_the_cap_is_a_buffer_by_another_name() -> None:
    greedy = record(claims=replace(CLAIMS, padding_numel=PSI // 4), change=bytes_more("gradient", PSI // 2))
    assert status("memory.at_rest", greedy) is Status.FAIL


def test_levels_decide_the_exit_code() -> None:
    uneven = record(change=bytes_more("optimizer", 1000, rank=1), claims=replace(CLAIMS, padding_numel=0))
    found = findings("memory.balance", uneven)
    assert Verdict(tuple(found)).exit_code() == 0
    assert Verdict(tuple(found), strict=True).exit_code() == 1


def test_moments_and_stages_are_the_fields_words() -> None:
    assert [m.value for m in Moment] == ["built", "forward", "backward", "stepped"]
    assert [int(s) for s in Stage] == [0, 1, 2, 3]


def test_groups_of_the_same_ranks_have_orders_of_their_own() -> None:
    """Two communicators: what is first on one rank may be second on another, as long as each of them is in order."""

    def in_groups(names: str) -> Change:
        def change(s: Sample) -> Sample:
            mine = names[:2] if s.rank else names[2:]
            sizes = {"a": 8, "b": 16}
            return replace(
                s,
                calls=tuple(
                    Call(3, "step", Collective.ALL_GATHER, sizes[c.lower()], 0, "bf16", tuple(range(N)), communicator=c)
                    for c in mine
                ),
            )

        return change

    assert status("traffic.order", record(change=in_groups("abba"))) is Status.PASS
    worse = findings("traffic.order", record(change=in_groups("abbA")))[0]
    assert worse.status is Status.FAIL
    assert "(A)" in worse.actual


def test_a_resumed_run_goes_on_with_the_same_bits_where_the_order_of_a_sum_does_not_matter() -> None:
    """At n = 4 a sum in another order is none of the checkpoint's business; on the exact model every order is the same."""

    def saved(scenario: str, *, late: str = "", early: str = "") -> Record:
        digests = (Digest(1, "parameter a", f"saved{early}"), Digest(2, "parameter a", f"next{late}"))
        return record(scenario, change=lambda s: replace(s, digests=digests))

    exact = saved("save-exact"), saved("resume-exact")
    assert status("state.resume", saved("save"), saved("resume", late="!"), *exact) is Status.PASS
    assert status("state.resume", saved("save"), saved("resume", early="!"), *exact) is Status.FAIL
    assert (
        status("state.resume", saved("save"), saved("resume"), exact[0], saved("resume-exact", late="!")) is Status.FAIL
    )
