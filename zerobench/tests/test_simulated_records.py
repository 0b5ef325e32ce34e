"""Records of simulated worlds, made by hand: what they may prove, and that they are never taken for measured ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.codec import decode, encode
from zerobench.finding import Finding, Status
from zerobench.judge import judge, plan
from zerobench.loader import BadFile
from zerobench.record import Record, Sample
from zerobench.report.matrix import Matrix
from zerobench.scenarios import NOT_SIMULATED, SCENARIOS
from zerobench.suite import load
from zerobench.tests.made import CASE, record
from zerobench.tests.test_judge import Change, bytes_more
from zerobench.tests.test_matrix import ABOUT, finding

SIMULATED = replace(CASE, launch="simulate")
SAME: Change = lambda s: s  # noqa: E731


def simulated(change: Change = SAME, *, ranks: tuple[int, ...] = (0, 3), scenario: str = "plain") -> Record:
    """A correct stage 2 at n = 4 of which `ranks` ran."""
    whole = record(scenario, SIMULATED, change=change)
    return replace(whole, samples=tuple(s for s in whole.samples if s.rank in ranks))


def word(check: str, made: Record) -> Finding:
    found = judge("made", [SIMULATED], [check], {made.id: made}, by="claim").findings
    return next(f for f in found if f.check == check)


def test_a_case_says_that_it_is_simulated_and_old_records_do_not() -> None:
    assert SIMULATED.id == f"{CASE.id}/simulated" and SIMULATED.family == f"{CASE.family}/simulated"
    assert SIMULATED.run("plain").id != CASE.run("plain").id
    old = {k: v for k, v in CASE.to_json().items() if k != "launch"}
    assert Case.from_json(old) == CASE and Case.from_json(SIMULATED.to_json()) == SIMULATED


def test_only_checks_of_bytes_and_collectives_are_planned_and_judged() -> None:
    runs = plan([SIMULATED], CHECKS)
    assert runs and all(SCENARIOS[run.scenario].simulable for run in runs.values())
    records = {id: record(run.scenario, SIMULATED) for id, run in runs.items()}
    for said in judge("made", [SIMULATED], CHECKS, records).findings:
        if not CHECKS[said.check].simulated:
            assert (said.status, said.actual) == (Status.SKIP, NOT_SIMULATED)
        else:
            assert said.check.split(".")[0] in ("memory", "traffic", "work", "runtime"), said.check
    chapters = {check.id.split(".")[0] for check in CHECKS.values() if not check.simulated}
    assert {"numerics", "state", "time"} <= chapters


def test_a_run_that_failed_fails_and_one_that_ended_proves_nothing_about_processes() -> None:
    assert word("runtime.completes", simulated()).status is Status.SKIP
    broken = replace(simulated(), status="error", reason="rank 0 raised")
    assert word("runtime.completes", broken).status is Status.FAIL


@pytest.mark.parametrize("check", ["memory.balance", "traffic.order", "work.sharded"])
def test_what_needs_every_rank_is_skipped_where_some_did_not_run(check: str) -> None:
    said = word(check, simulated())
    assert (said.status, said.actual) == (
        Status.SKIP,
        "simulated: needs every rank, and of 4 only ranks 0, 3 ran",
    )
    assert word(check, simulated(ranks=(0, 1, 2, 3))).status is Status.PASS


@pytest.mark.parametrize("by", [-4, 4])
def test_bytes_at_rest_are_exact_in_both_directions(by: int) -> None:
    assert word("memory.at_rest", simulated()).status is Status.PASS
    said = word("memory.at_rest", simulated(bytes_more("optimizer", by)))
    assert said.status is Status.FAIL and said.ranks == (0, 3)
    assert said.detail[0].startswith("optimizer: 7.") and f"({2 * by:+d} B" in said.detail[0]


def test_uneven_shares_are_not_judged_by_some_ranks_but_a_whole_copy_is() -> None:
    uneven = word("memory.at_rest", simulated(bytes_more("optimizer", 1200, rank=0)))
    assert uneven.status is Status.SKIP and "only ranks 0, 3 ran" in uneven.actual
    whole = word("memory.at_rest", simulated(bytes_more("optimizer", 12 * 1200, rank=0)))
    assert whole.status is Status.FAIL and whole.ranks == (0,)


def test_traffic_is_the_mean_of_the_ranks_that_ran() -> None:
    said = word("traffic.volume", simulated())
    assert said.status is Status.PASS and dict(said.metrics)["passes"] == 2.0

    def half(s: Sample) -> Sample:
        return replace(s, calls=s.calls[::2])

    assert word("traffic.volume", simulated(half)).status is Status.FAIL


def test_the_matrix_has_a_row_of_its_own_for_what_was_simulated() -> None:
    made = Matrix()
    for case in (CASE, SIMULATED):
        made.add(ABOUT, [case], [finding(case.id)])
    assert made.implementations == ["zero2", "zero2 (simulated)"]
    for name, case in zip(made.implementations, (CASE, SIMULATED), strict=True):
        assert list(made.cell(name, "traffic.volume").findings) == [case.id]
    assert made.command(finding(SIMULATED.id)).startswith("zerobench run ")


def test_a_large_group_travels_by_its_ends() -> None:
    for group in ((), (3,), tuple(range(15)), tuple(range(7, 1031)), (*range(20), 21)):
        assert decode(tuple[int, ...], encode(group)) == group
    assert encode(tuple(range(1024))) == "0..1023"
    assert encode(tuple(range(15))) == list(range(15))
    for wrong in ("5..4", "0..99999999", "0...3", "x"):
        with pytest.raises(ValueError):
            decode(tuple[int, ...], wrong)


def test_a_simulated_suite_needs_no_device(tmp_path: Path) -> None:
    text = "version: 1\nsuite: s\nlaunch: simulate\ndevice: {}\nmatrix: {{implementation: [zero2], model: [gpt-tiny], "
    text += "world_size: [1024], precision: [bf16]}}\nchecks: [memory.at_rest]\n"
    path = tmp_path / "s.yaml"
    path.write_text(text.format("cpu"))
    assert [case.id for case in load(path).cases()] == ["zero2/gpt-tiny/n1024/bf16/simulated"]
    path.write_text(text.format("cuda"))
    with pytest.raises(BadFile, match=r"s\.yaml:4:.*a simulated world has tensors without memory"):
        load(path)
