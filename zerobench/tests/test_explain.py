"""Waterfalls: they sum to what was measured, name what is evident, and leave the rest unexplained."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.case import Case
from zerobench.claims import Claims, Recipe
from zerobench.cli import main
from zerobench.explain import explain
from zerobench.explain.find import find_case
from zerobench.explain.waterfall import Kind, Waterfall
from zerobench.launch.local import Local
from zerobench.mutants.names import MUTANTS
from zerobench.readings import DevicePeak, Level, Memory, Place, Resident
from zerobench.record import Peak, Piece, Record, Sample
from zerobench.terms import Moment, Stage
from zerobench.tests.made import CASE, PSI, N, held, record, sample
from zerobench.tests.test_cli import stored

LAW = 2 * PSI + 14 * PSI // N  # bytes: the paper's stage 2 at four ranks


def rows(waterfall: Waterfall) -> dict[str, int]:
    return {row.name: row.nbytes for row in waterfall.rows}


def watched(change: Any = None, *, peak: int = LAW + 900, phase: str = "backward", **more: Any) -> dict[str, Record]:
    """The made stage 2, with peaks of its last step and of the bare model (600 bytes over its parameters)."""

    def seen(sample: Sample) -> Sample:
        sample = replace(sample, peaks=(Peak(3, phase, peak),), bare_peaks=(Peak(-1, "backward", 600),))
        return change(sample) if change else sample

    made = record(change=seen, **more)
    return {made.id: made}


def at(sample: Sample, moment: Moment, **more: Any) -> Sample:
    """`sample` with its holdings at `moment` changed."""
    return replace(sample, holdings=tuple(replace(h, **more) if h.moment is moment else h for h in sample.holdings))


def test_a_right_stage_2_is_the_formula_and_its_peak_is_activations_and_buckets() -> None:
    rest, peak = explain(CASE, watched())
    assert (rest.moment, rest.total, rest.unexplained) == ("at rest", LAW, 0)
    assert rows(rest) == {"formula": LAW, "unexplained": 0}
    assert "2 Psi + 14 Psi/4" in rest.rows[0].why
    # two buckets of the largest parameter, 900 elements of bf16, are allowed: 3600 bytes, of which 300 are there
    assert rows(peak) == {"formula": LAW, "activations": 600, "buckets": 300, "unexplained": 0}
    assert peak.rows[2].kind is Kind.BOUND and "3.6 kB" in peak.rows[2].why


def test_what_no_allowance_covers_is_unexplained() -> None:
    over = LAW + 600 + 2 * 900 * 2 + 17
    peak = explain(CASE, watched(peak=over))[1]
    assert (peak.total, peak.unexplained) == (over, 17)
    assert float(peak.share) == 17 / over


def test_a_step_starts_from_what_backward_left() -> None:
    """casts (4 + 2) x 300, temporaries 8 x 300, one fp32 bucket of 900: 7800 bytes are allowed."""
    peak = explain(CASE, watched(phase="step", peak=LAW + 7801))[1]
    assert rows(peak) == {"formula": LAW, "casts + optimizer's temporaries + buckets": 7800, "unexplained": 1}
    assert "activations" not in " ".join(peak.absent)


def test_the_claims_differences_have_rows_of_their_own() -> None:
    claims = Claims(Stage.GRADIENT, recipe=Recipe("fp32", "fp32", None, "fp32"), padding_numel=2, shard_size=2)
    claimed = {"parameter": 4 * PSI, "gradient": 0, "optimizer": 8 * (PSI // 2 + 2)}
    live = sum(claimed.values()) + 40

    def change(s: Sample) -> Sample:
        return at(s, Moment.STEPPED, claimed=claimed, live=live, scalars=40)

    rest = explain(CASE, watched(change, claims=claims))[0]
    recipe = 4 * PSI + 12 * PSI // N - LAW
    assert rows(rest) == {
        "formula": LAW,
        "recipe": recipe,
        "shard groups": 12 * PSI // 2 - 12 * PSI // N,
        "gradients not held": -4 * PSI // 2,
        "padding": 16,
        "one-element tensors": 40,
        "unexplained": 0,
    }
    assert sum(rows(rest).values()) == live


def test_a_copy_goes_by_what_its_content_looks_like_and_what_is_unknown_stays_unexplained() -> None:
    pieces = (Piece(5000, "aten.clone at leak.py:7", "weight"), Piece(64, "aten.empty at odd.py:3"))

    def change(s: Sample) -> Sample:
        # contents are compared before the last step only: after it the same pieces have no label
        s = at(s, Moment.BACKWARD, live=LAW + 5100, unclaimed=5100, pieces=pieces)
        plain = tuple(replace(p, looks_like=None) for p in pieces)
        return at(s, Moment.STEPPED, live=LAW + 5100, unclaimed=5100, pieces=plain)

    rest = explain(CASE, watched(change, peak=LAW + 5800))[0]
    assert rows(rest) == {"formula": LAW, "unclaimed, looks like weight": 5000, "unexplained": 100}
    assert rest.surplus == 5000 and "leak.py:7" in rest.rows[1].why
    assert "100 B that nobody claims (64 B made by aten.empty at odd.py:3" in rest.rows[-1].why
    peak = explain(CASE, watched(change, peak=LAW + 5800))[1]
    assert peak.unexplained == 100  # no allowance of backward may cover what was unexplained before it


@pytest.mark.parametrize(("stage", "name", "surplus"), [(2, "gradients kept after the step", 600), (1, "buckets", 0)])
def test_a_gradient_that_stays_after_the_step_is_named_and_allowed_below_stage_2_only(stage, name, surplus) -> None:
    claimed = {k: v for k, v in held(3, Moment.STEPPED).claimed.items() if k != "gradient"}
    rest = explain(
        CASE,
        watched(
            lambda s: at(s, Moment.STEPPED, claimed=claimed, live=LAW + 8, unclaimed=608), claims=Claims(Stage(stage))
        ),
    )[0]
    assert (rows(rest)[name], rest.surplus) == (2 * PSI // N, surplus)
    assert stage == 1 or rest.unexplained == 8


def test_a_peak_below_the_sum_of_its_parts_says_so() -> None:
    peak = explain(CASE, watched(peak=LAW + 500))[1]
    assert (peak.unexplained, float(peak.share)) == (-100, 100 / (LAW + 500))
    assert "less than the steps come to" in peak.rows[-1].why


def test_more_than_claimed_is_a_surplus_unless_other_ranks_have_as_much_less() -> None:
    def change(s: Sample, of: set[int], extra: int) -> Sample:
        more = extra if s.rank in of else -extra if len(of) == 2 else 0
        claimed = dict(held(3, Moment.STEPPED).claimed)
        claimed["optimizer"] += more
        return at(s, Moment.STEPPED, claimed=claimed, live=sum(claimed.values()))

    one = explain(CASE, watched(lambda s: change(s, {1}, 4000)))[0]
    assert (one.rank, one.surplus, rows(one)["optimizer beyond the claim"]) == (1, 4000, 4000)
    two = explain(CASE, watched(lambda s: change(s, {0, 1}, 400)))[0]
    assert (two.surplus, rows(two)["uneven shares, optimizer"]) == (0, 400)


@given(
    st.dictionaries(st.sampled_from(["parameter", "gradient", "optimizer", "buffer"]), st.integers(0, 10**9)),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.integers(0, 10**10),
    st.lists(st.integers(1, 10**6), max_size=3),
    st.sampled_from(Stage),
)
def test_rows_sum_to_what_was_measured_whatever_it_was(
    claimed: dict[str, int], live: int, scalars: int, peak: int, pieces: list[int], stage: Stage
) -> None:
    made = tuple(Piece(b, "x", "gradient" if b % 2 else None) for b in pieces)

    def change(s: Sample) -> Sample:
        odd = {"claimed": claimed, "live": live, "scalars": scalars, "unclaimed": sum(pieces), "pieces": made}
        return replace(s, holdings=tuple(replace(h, **odd) for h in s.holdings))

    found = explain(CASE, watched(change, peak=peak, claims=Claims(stage)))
    assert [w.total for w in found] == [live, peak]
    for waterfall in found:
        assert sum(row.nbytes for row in waterfall.rows) == waterfall.total
        assert waterfall.rows[-1].kind is Kind.UNEXPLAINED


def test_rows_that_do_not_sum_are_no_waterfall() -> None:
    rest = explain(CASE, watched())[0]
    with pytest.raises(ValueError, match="rows come to"):
        replace(rest, total=rest.total + 1)


def test_a_step_without_evidence_is_named_and_not_counted() -> None:
    rest, peak = explain(CASE, watched(lambda s: replace(s, bare_peaks=())))
    assert "activations: this record has no run of the bare model" in peak.absent
    assert "activations" not in rows(peak)
    assert any("not measured on a CPU run" in words for words in rest.absent)


# -- a GPU: every number below is made up, no GPU had a part in it -----------------------------------------------------

MIB = 1 << 20
GPU = Place("cuda:0", "nccl", "gpu", "made up", "GPU-made-up")


def on_gpu(growth: int = 0, nvml: int | None = 600 * MIB) -> dict[str, Record]:
    """Two sizes of model: requested, allocated, active, reserved and NVML, beside a reference process of 500 MiB that
    has reserved 2 MiB. The context costs 64 MiB more than its own; `growth` is what the larger model adds to that."""
    records = {}
    for name, more in (("size-1", 0), ("size-2", growth)):
        raw = {"requested": LAW + 5000, "allocated": LAW + 6000, "active": LAW + 6000, "reserved": 30 * MIB}
        levels = [Level(k, v, 0, v) for k, v in raw.items() if k != "reserved"]
        levels.append(Level("reserved", raw["reserved"], 2 * MIB, 28 * MIB))
        seen = None if nvml is None else 28 * MIB + 564 * MIB + more
        levels.append(Level("nvml", seen, 500 * MIB, None if seen is None else seen - 500 * MIB, "shared by others"))

        def change(s: Sample, levels: list[Level] = levels) -> Sample:
            last = held(1, Moment.STEPPED)
            before = (held(0, Moment.STEPPED), held(1, Moment.BACKWARD))
            peaks = (Peak(1, "backward", LAW + 900),)
            memory = Memory(
                LAW, LAW, LAW, 30 * MIB, LAW + 900 + 4900 + 50, LAW + 7000, LAW + 7200, 32 * MIB
            )  # 50 more at the peak than ledger and surroundings have
            return replace(
                sample(s.rank),
                place=GPU,
                holdings=(*before, last),
                allocator=(None, None, LAW + 100),
                peaks=peaks,
                bare_peaks=(Peak(-1, "backward", 600),),
                residents=(Resident(1, Moment.STEPPED, tuple(levels)),),
                device_peaks=(DevicePeak(1, "backward", memory),),
            )

        made = record(name, case=replace(CASE, warmup=1, measured=1, device="cuda"), change=change)
        records[made.id] = made
    return records


def test_on_a_gpu_each_level_is_what_it_adds_to_the_one_inside() -> None:
    case = replace(CASE, device="cuda")
    rest, peak = explain(case, on_gpu())
    assert rows(rest) == {
        "formula": LAW,
        "the process beside the subject": 4900,
        "allocator rounding": 1000,
        "unused parts of segments": 28 * MIB - LAW - 6000,
        "context and communicators": 64 * MIB,
        "unexplained": 100,  # the allocator has handed out 100 bytes that the ledger does not know
    }
    assert rest.total == 92 * MIB and rest.outer
    assert rows(peak) == {
        "formula": LAW,
        "activations": 600,
        "buckets": 300,
        "the process beside the subject": 4900,
        "allocator rounding": 7000 - 5850,
        "blocks freed late": 200,
        "unused parts of segments": 32 * MIB - LAW - 7200,
        "unexplained": 50,
    }
    assert peak.total == 32 * MIB
    assert any("NVML is read at moments" in words for words in peak.absent)


def test_surroundings_that_grow_with_the_model_are_unexplained() -> None:
    rest = explain(replace(CASE, device="cuda"), on_gpu(growth=10 * MIB))[0]
    assert rest.run.endswith("@size-2")
    assert rows(rest)["context and communicators"] == 64 * MIB
    assert rest.unexplained == 100 + 10 * MIB
    assert "more of 'context and communicators' than at another size" in rest.rows[-1].why


def test_a_level_that_was_not_read_ends_the_waterfall_with_its_reason() -> None:
    rest = explain(replace(CASE, device="cuda"), on_gpu(nvml=None))[0]
    assert rest.total == 28 * MIB and "bytes by reserved" in rest.what
    assert "context and communicators: nvml says nothing: shared by others" in rest.absent


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_case_is_found_by_a_part_of_its_id() -> None:
    cases = {c.id: c for c in (CASE, replace(CASE, world_size=2), replace(CASE, implementation="other"))}
    assert find_case("other", cases).implementation == "other"
    assert find_case(CASE.id, cases) is cases[CASE.id]
    with pytest.raises(ValueError, match="part of 3 cases, name one: zero2/gpt-tiny/n4/bf16, zero2/gpt-tiny/n2/bf16"):
        find_case("gpt-tiny", cases)
    with pytest.raises(ValueError, match="did you mean 'zero2/gpt-tiny/n4/bf16'"):
        find_case("zero2/gpt-tin/n4/bf16", cases)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, *watched().values())
    out = tmp_path / "x.json"
    assert main(["explain", str(path), "zero2", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"formula +{LAW:,} +5\.500", said) and "unexplained: 0 % of what was measured" in said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["moment"] for line in lines] == ["at rest", "at the peak"]
    assert all(sum(row["nbytes"] for row in line["rows"]) == line["total_nbytes"] for line in lines)


def test_what_cannot_be_explained_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = record(status="error", reason="rank 1 died")
    path = stored(tmp_path, failed)
    assert main(["explain", str(path), CASE.id]) == 6
    assert "plain: error: rank 1 died" in capsys.readouterr().err
    assert main(["explain", str(path), "zero9"]) == 2
    assert "no case 'zero9'" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.jsonl"), "zero2"]) == 2


def test_a_chart_needs_matplotlib_and_a_known_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path, *watched().values())
    assert main(["explain", str(path), "zero2", "--chart", str(tmp_path / "x.gif")]) == 2
    assert "a chart is an .svg or a .png file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["explain", str(path), "zero2", "--chart", str(tmp_path / "x.svg")]) == 3
    assert "pip install 'zerobench[report]'" in capsys.readouterr().err


def test_the_chart_has_a_bar_for_every_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = stored(tmp_path, *watched().values())
    for name, begins in (("x.svg", b"<?xml"), ("x.png", b"\x89PNG")):
        chart = tmp_path / name
        assert main(["explain", str(path), "zero2", "--chart", str(chart)]) == 0
        assert chart.read_bytes().startswith(begins)
    assert (tmp_path / "x.svg").read_text().count("<!-- activations  600 B -->") == 1


# -- real ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local() as local:
        yield local


def measured(local: Local, reference: str) -> tuple[Waterfall, Waterfall]:
    """The waterfalls of a run of two ranks, at rest and at the peak."""
    case = Case("subject", reference, "gpt-tiny", 2, "bf16")
    made = local.launch(case.run("plain"), deadline_s=60.0, suite="made")
    rest, peak = explain(case, {made.id: made})
    assert all(sum(row.nbytes for row in w.rows) == w.total for w in (rest, peak))
    return rest, peak


@pytest.mark.parametrize("reference", ["zero2", "torch-ddp", "fsdp2"])
def test_real_ranks_leave_next_to_nothing_unexplained(local: Local, reference: str) -> None:
    rest, peak = measured(local, reference)
    for waterfall in (rest, peak):
        assert waterfall.share < 0.001, waterfall
        assert waterfall.surplus == 0
    assert rows(peak)["activations"] > 0


def test_a_leaked_copy_of_the_gradient_is_not_explained_away(local: Local) -> None:
    rest, peak = measured(local, "zerobench.mutants.memory:LeakedFullGradient")
    assert rest.surplus + rest.unexplained == peak.surplus + peak.unexplained == 2 * rest.psi
    assert "aten.clone" in " ".join(row.why for row in rest.rows)


def test_a_second_copy_of_the_reduced_gradient_goes_by_its_name(local: Local) -> None:
    rest, _ = measured(local, MUTANTS["second-gradient-copy"].reference)
    assert rest.surplus + rest.unexplained == 2 * rest.psi
    assert rows(rest)["unclaimed, looks like gradient"] > rest.psi
