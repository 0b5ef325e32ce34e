"""Accept and compare: equality both ways for what is exact, a coarse alarm for time, and no gap in silence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from zerobench.baseline_file import By
from zerobench.baseline_times import TimeBaseline, compare
from zerobench.cli import main
from zerobench.finding import Status
from zerobench.machine import MachineClass
from zerobench.record import Provenance, Record, Sample
from zerobench.stats import rank_sum
from zerobench.store import Writer
from zerobench.terms import Moment
from zerobench.tests.made import CASE, record

CHECKS = ("traffic.volume", "time.step")  # one run a case: plain
GPU = {
    "device": "NVIDIA H200",
    "device_count": 8,
    "interconnect": "nvlink",
    "driver": "580.65.06",
    "backend": "nccl 2.27",
}
Change = Callable[[Sample], Sample]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def result(name: str, *, change: Change = lambda s: s, times: tuple[float, ...] = (0.01,), **about: Any) -> str:
    """A results file of the case zero2 (and of others given as `cases`), a launch for each of `times`."""
    cases = about.pop("cases", (CASE,))
    more = about.pop("more", {})
    provenance = Provenance(
        "p1", "0.1.0", "made", "digest", "host", "2025-01-01", torch="2.13.0", backend="gloo", cpu="Some CPU", cores=2
    )
    provenance = replace(provenance, cases=tuple(c.to_json() for c in cases), checks=CHECKS, **about)
    path = Path(name)
    path.unlink(missing_ok=True)
    with Writer(path) as writer:
        writer.write(provenance)
        for seconds in times:
            for case in cases:
                writer.write(made(case, change, seconds, more))
    return name


def made(case: Any, change: Change, seconds: float, more: dict[str, Any]) -> Record:
    return replace(
        record(case=case, change=lambda s: change(replace(s, times_s=(seconds,) * 3))),
        suite="made",
        provenance="p1",
        **more,
    )


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code of compare, its findings by id, and what it printed."""
    capsys.readouterr()
    code = main(["compare", *arguments, "--json", "found.json"])
    out = capsys.readouterr()
    lines = Path("found.json").read_text().splitlines() if Path("found.json").exists() else []
    Path("found.json").unlink(missing_ok=True)
    return code, {f["id"]: f for f in map(json.loads, lines)}, out.out + out.err


def fuller(extra: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Change:
    """A sample with `extra` bytes more of optimizer states at every moment, on some ranks."""

    def change(sample: Sample) -> Sample:
        if sample.rank not in ranks:
            return sample
        held = (
            replace(h, claimed=dict(h.claimed) | {"optimizer": h.claimed["optimizer"] + extra}, live=h.live + extra)
            for h in sample.holdings
        )
        return replace(sample, holdings=tuple(held))

    return change


def test_what_was_accepted_compares_equal_and_is_one_line_a_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = result("a.jsonl")
    assert main(["accept", first, "--bytes"]) == 0
    assert "baselines/bytes/made.json: 1 cases, 1 runs" in capsys.readouterr().out
    text = (home / "baselines/bytes/made.json").read_text()
    (line,) = [x for x in text.splitlines() if "@plain" in x and "traffic" in x]
    numbers = json.loads("{" + line + "}")[f"{CASE.id}@plain"]
    # stage 2 of Psi = 1200 at n = 4 in bf16: 2 Psi weights, 2 Psi/n gradients, 12 Psi/n optimizer states
    assert numbers["nbytes"] == {
        "parameter": [2400] * 4,
        "gradient": [600] * 4,
        "optimizer": [3600] * 4,
        "live at rest": [6600] * 4,
    }
    assert numbers["traffic"]["reduce-scatter bf16 elements"] == [4 * 1200] * 4  # four steps
    assert numbers["traffic"]["ring"] == [2 * 4 * 1200] * 4

    code, found, _ = findings(capsys, first, "--bytes")
    assert code == 0 and {f["status"] for f in found.values()} == {"pass"}
    assert list(found) == [f"made::{CASE.id}::baseline.bytes", f"made::{CASE.id}::baseline.traffic"]
    assert main(["accept", result("b.jsonl", started="2026-01-01"), "--bytes"]) == 0  # by another, the same numbers
    assert "unchanged" in capsys.readouterr().out and (home / "baselines/bytes/made.json").read_text() == text


@pytest.mark.parametrize("extra", [400, -400])
def test_bytes_fail_both_ways_and_name_category_rank_and_delta(
    home: Path, capsys: pytest.CaptureFixture[str], extra: int
) -> None:
    main(["accept", result("a.jsonl"), "--bytes"])
    code, found, text = findings(capsys, result("b.jsonl", change=fuller(extra, (1, 2))), "--bytes")
    finding = found[f"made::{CASE.id}::baseline.bytes"]
    assert code == 1 and finding["status"] == "fail" and finding["ranks"] == [1, 2] and finding["relation"] == "=="
    assert f"{extra:+d}, from" in finding["actual"] and "ranks 1-2" in finding["actual"]
    told = " ".join([finding["actual"], *finding["detail"]])
    assert f"optimizer {3600 + extra} B on ranks 1-2 ({extra:+d}, from 3600; plain)" in told
    assert f"FAIL made::{CASE.id}::baseline.bytes" in text and finding["requirement"] in text
    assert found[f"made::{CASE.id}::baseline.traffic"]["status"] == "pass"


def test_traffic_fails_by_kind_and_dtype(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["accept", result("a.jsonl"), "--bytes"])

    def wider(sample: Sample) -> Sample:
        return replace(sample, calls=tuple(replace(c, dtype="fp32") if c.phase == "step" else c for c in sample.calls))

    code, found, _ = findings(capsys, result("b.jsonl", change=wider), "--bytes")
    told = json.dumps(found[f"made::{CASE.id}::baseline.traffic"])
    assert code == 1 and found[f"made::{CASE.id}::baseline.bytes"]["status"] == "pass"
    assert "all-gather fp32 calls 4 calls on each rank (+4, from 0; plain)" in told
    assert "all-gather bf16 elements 0 elements on each rank (-4800, from 4800; plain)" in told


def test_missing_and_extra_cases_and_runs_are_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(CASE, implementation="zero3")
    main(["accept", result("a.jsonl", cases=(CASE, other)), "--bytes"])
    code, found, _ = findings(capsys, result("b.jsonl"), "--bytes")
    gone = found[f"made::{other.id}::baseline.bytes"]
    assert code == 4 and gone["status"] == "missing" and "not in the result" in gone["actual"]
    assert findings(capsys, "b.jsonl", "--bytes", "-k", "zero2")[0] == 0
    assert main(["accept", "b.jsonl", "--bytes"]) == 2 and "--drop" in capsys.readouterr().err
    assert main(["accept", "b.jsonl", "--bytes", "--drop"]) == 0

    code, found, _ = findings(capsys, "a.jsonl", "--bytes")
    assert code == 4 and "not in the baseline" in found[f"made::{other.id}::baseline.bytes"]["actual"]
    skipped = result("c.jsonl", more={"status": "skip", "reason": "unsupported: bucket", "samples": ()})
    code, found, _ = findings(capsys, skipped, "--bytes")
    gone = found[f"made::{CASE.id}::baseline.bytes"]
    assert code == 4 and "in the baseline, not measured (skip: unsupported: bucket)" in gone["actual"]


def test_a_failed_or_unsteady_result_is_no_baseline(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", result("a.jsonl", more={"status": "error", "reason": "rank 1 died"}), "--bytes"]) == 2
    assert "rank 1 died; a baseline needs every run" in capsys.readouterr().err
    turn = iter(range(100))
    unsteady = result("b.jsonl", change=lambda s: fuller(next(turn))(s), times=(0.01, 0.01))
    assert main(["accept", unsteady, "--bytes"]) == 2 and "launches differ" in capsys.readouterr().err
    assert not (home / "baselines").exists()


def test_no_byte_baseline_is_exit_4_with_the_command_that_makes_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = result("a.jsonl")
    code, _, text = findings(capsys, first)
    assert code == 4 and "zerobench accept a.jsonl --bytes" in text


def test_step_times_need_five_launches_on_both_sides(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    four = result("a.jsonl", times=(0.01,) * 4, **GPU)
    assert main(["accept", four]) == 6
    assert "zerobench run made --launches 5" in capsys.readouterr().err and not (home / "baselines").exists()
    five = result("b.jsonl", times=(0.010, 0.011, 0.012, 0.010, 0.011), **GPU)
    assert main(["accept", five]) == 0
    slug = "nvidia-h200-x8-nvlink-driver580-torch2.13.0-nccl-2.27"
    stored = json.loads((home / "baselines" / slug / "made.json").read_text())
    assert stored["runs"][f"{CASE.id}@plain"] == [[t] * 3 for t in (0.010, 0.011, 0.012, 0.010, 0.011)]
    code, found, text = findings(capsys, four)
    assert (
        code == 6 and found[f"made::{CASE.id}::time.regression"]["status"] == "inconclusive" and "--launches 5" in text
    )


@pytest.mark.parametrize(
    ("times", "status", "code"),
    [
        ((0.0112, 0.0113, 0.0112, 0.0113, 0.0112), "fail", 1),  # 12 % slower, no overlap
        ((0.0109, 0.0109, 0.0109, 0.0109, 0.0109), "pass", 0),  # 9 %
        ((0.0112, 0.0113, 0.0080, 0.0113, 0.0090), "inconclusive", 6),  # 12 %, but two launches are fast
        ((0.0080, 0.0080, 0.0080, 0.0080, 0.0080), "pass", 0),
    ],
)
def test_time_is_a_coarse_alarm(
    home: Path, capsys: pytest.CaptureFixture[str], times: tuple[float, ...], status: str, code: int
) -> None:
    assert main(["accept", result("a.jsonl", times=(0.010,) * 5, **GPU)]) == 0
    got, found, _ = findings(capsys, result("b.jsonl", times=times, **GPU))
    finding = found[f"made::{CASE.id}::time.regression"]
    assert (got, finding["status"], finding["level"]) == (code, status, "MUST")
    assert ("accept it" in " ".join(finding["detail"])) == (max(times) < 0.009)


def test_a_class_without_times_is_exit_4_and_another_class_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["accept", result("a.jsonl", times=(0.01,) * 5, **GPU)])
    newer = result("b.jsonl", times=(0.01,) * 5, **(GPU | {"driver": "590.1"}))
    code, found, text = findings(capsys, newer)
    assert code == 4 and found[f"made::{CASE.id}::time.regression"]["status"] == "missing"
    assert found[f"made::{CASE.id}::baseline.bytes"]["status"] == "pass"  # bytes are of any machine
    assert "no step times of this machine class yet" in text and "--launches 5" in text
    (stored,) = (home / "baselines").glob("nvidia*/made.json")
    code, _, text = findings(capsys, newer, str(stored))
    assert code == 2 and "another machine class: driver 590, not 580" in text


@pytest.mark.parametrize(
    ("base", "head"), [((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)), ((1, 3, 5, 5, 6), (2, 5, 7, 8, 9)), ((4, 4), (4, 4, 4))]
)
def test_the_rank_sum_is_the_share_of_all_ways_to_split_the_launches(
    base: tuple[float, ...], head: tuple[float, ...]
) -> None:
    pooled = [*base, *head]
    ranks = [sum(v < w for v in pooled) + (sum(v == w for v in pooled) + 1) / 2 for w in pooled]
    seen = sum(ranks[len(base) :])
    sums = [sum(chosen) for chosen in combinations(ranks, len(head))]
    assert rank_sum(base, head) == sum(s >= seen for s in sums) / len(sums)


def test_the_worst_of_several_timed_runs_speaks_for_the_case() -> None:
    def times(plain: float) -> TimeBaseline:
        runs = {f"{CASE.id}@timed": ((0.01,) * 3,) * 5, f"{CASE.id}@plain": ((plain,) * 3,) * 5}
        about = Provenance("p", "0", "made", "d", "h", "t", device="NVIDIA H200")
        return TimeBaseline("made", MachineClass.of(about), By.of(about), runs)

    (finding,) = compare(times(0.02), times(0.01), {CASE.id: (f"{CASE.id}@plain", f"{CASE.id}@timed")})
    assert finding.status is Status.FAIL and finding.actual.startswith("plain: 20 ms, +100.0%")


def test_wall_time_on_a_shared_cpu_never_gates(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["accept", result("a.jsonl", times=(0.01,) * 5)])
    code, found, _ = findings(capsys, result("b.jsonl", times=(0.03,) * 5))
    finding = found[f"made::{CASE.id}::time.regression"]
    assert (code, finding["status"], finding["level"]) == (0, "fail", "INFO")


def test_the_class_holds_what_changes_speed_and_no_more() -> None:
    about = Provenance(
        "p", "0", "s", "d", "h", "t", torch="2.13.0", backend="nccl 2.27", device="NVIDIA H200", driver="580.1"
    )
    here = MachineClass.of(about)
    loud = replace(about, environment={"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}, host="other", python="3.13")
    assert MachineClass.of(loud) == here
    tuned = MachineClass.of(replace(about, environment={"NCCL_ALGO": "Ring"}))
    assert here.differences(tuned) == ["environment NCCL_ALGO=Ring, not (none)"] and tuned.slug != here.slug
    assert MachineClass.of(replace(about, device="../../x y")).slug.startswith("x-y-x0")  # a folder's name, no path


class Trap:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


RUN = f"{CASE.id}@plain"
HOSTILE = [  # the file, what is said of it, and what was done to it
    ("bytes", "nested too deeply", lambda t: "[" * 100_000),
    ("bytes", ":1: not a baseline of zerobench", lambda t: "[1]"),
    ("bytes", ":2: not JSON", lambda t: t[1:]),
    ("bytes", ":3: schema 2; this zerobench reads up to 1", lambda t: t.replace('"schema": 1', '"schema": 2')),
    ("bytes", ":3: schema: expected int, got str", lambda t: t.replace('"schema": 1', '"schema": "1"')),
    ("bytes", f":10: {RUN}: value.psi: expected int, got str", lambda t: t.replace('"psi": 1200', '"psi": "x"')),
    ("bytes", f":10: {RUN}: a negative number", lambda t: t.replace("3600", "-3600", 1)),
    ("bytes", ":10: NaN is not JSON", lambda t: t.replace("3600", "NaN", 1)),
    ("bytes", ":10: 1111111111111111111...: a whole number of", lambda t: t.replace("3600", "1" * 9999, 1)),
    ("bytes", ":5: 'suite' stands there twice", lambda t: t.replace('"suite": "made",', '"suite": "made",\n' * 2)),
    ("bytes", ":5: by: expected an object, got int", lambda t: t.replace('"by": {', '"by": 3, "was": {')),
    ("bytes", ":2: a baseline of times, not of bytes", lambda t: t.replace('"bytes"', '"times"', 1)),
    ("bytes", "'runs' is missing", lambda t: t.replace('"runs"', '"runners"')),
    ("bytes", "a baseline of suite 'other'", lambda t: t.replace('"suite": "made"', '"suite": "other"')),
    ("times", f":8: {RUN}: a time that is not", lambda t: t.replace("0.01", "-1", 1)),
    ("times", ":8: 1e999 is past any float", lambda t: t.replace("0.01", "1e999", 1)),
    ("times", f":8: {RUN}: value[0][0]: expected float", lambda t: t.replace("0.01", "true", 1)),
]


def test_hostile_baselines_are_refused_by_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = result("a.jsonl", times=(0.01,) * 5)
    main(["accept", first])
    paths = {"bytes": home / "baselines/bytes/made.json", "times": next(home.glob("baselines/cpu*/made.json"))}
    good = {kind: path.read_text() for kind, path in paths.items()}
    for kind, said, edit in HOSTILE:
        paths[kind].write_text(edit(good[kind]))
        code, _, text = findings(capsys, first)
        assert (code, said in text) == (2, True), (said, text)
        assert paths[kind].name in text
        paths[kind].write_text(good[kind])
    assert findings(capsys, first)[0] == 0


def test_a_pickle_is_refused_and_not_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = result("a.jsonl")
    main(["accept", first, "--bytes"])
    Path("baselines/bytes/made.json").write_bytes(pickle.dumps(Trap()))
    code, _, text = findings(capsys, first, "--bytes")
    assert code == 2 and "not text in UTF-8" in text and not Path("sprung").exists()


def test_a_huge_baseline_is_not_read_whole(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = result("a.jsonl")
    main(["accept", first, "--bytes"])
    monkeypatch.setattr("zerobench.baseline_file.MAX_NBYTES", 100)
    code, _, text = findings(capsys, first, "--bytes")
    assert code == 2 and "larger than 100 bytes" in text


def test_a_suite_name_that_is_a_path_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(result("a.jsonl"))
    path.write_text(path.read_text().replace('"suite":"made"', '"suite":"../../made"'))
    assert main(["accept", str(path), "--bytes"]) == 2 and "no suite is called" in capsys.readouterr().err


def test_the_records_of_a_launch_at_rest_are_the_last_ones() -> None:
    """The baseline reads the last BACKWARD and STEPPED: what an earlier step held does not count."""
    from zerobench.baseline import Exact

    def early(sample: Sample) -> Sample:
        held = (replace(h, claimed={"optimizer": 1}, live=1) if h.step < 3 else h for h in sample.holdings)
        return replace(sample, holdings=tuple(held))

    assert Exact.of(record(change=early)) == Exact.of(record())
    assert {h.moment for h in record().samples[0].holdings} >= {Moment.BACKWARD, Moment.STEPPED}


def test_no_collectives_is_a_number_and_memory_that_nobody_watched_is_not(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(sample: Sample) -> Sample:
        return replace(sample, calls=(), holdings=(), allocator=())

    main(["accept", result("a.jsonl", change=silent), "--bytes"])
    code, found, _ = findings(capsys, "a.jsonl", "--bytes")
    assert code == 0 and [f["status"] for f in found.values()] == ["skip", "pass"]
    code, found, _ = findings(capsys, result("b.jsonl"), "--bytes")
    assert code == 1 and [f["status"] for f in found.values()] == ["fail", "fail"]
