"""History: a shift is found and what changed there is named, noise is none, small losses do not add up unseen."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerobench.case import Case
from zerobench.cli import main
from zerobench.finding import Status
from zerobench.history import MIN_LEVEL, Point, Series, judge_time, penalty, segments
from zerobench.record import Provenance
from zerobench.store import Writer
from zerobench.tests.made import CASE, record

GPU = {"device": "NVIDIA H200", "device_count": 8, "interconnect": "nvlink", "backend": "nccl 2.27"}


def about(day: int, **more: Any) -> Provenance:
    started = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T00:00:00+00:00"
    made = Provenance(f"p{day}", "0.1.0", "made", "digest", "host", started, torch="2.13.0", cpu="Some CPU", cores=2)
    return replace(made, cases=(CASE.to_json(),), checks=("time.step",), **more)


def series(values: Sequence[float], **more: Any) -> Series:
    points = tuple(Point(about(day), value) for day, value in enumerate(values))
    return replace(Series("made", "zero2/gpt-tiny/n4/bf16@plain", "GPU x8", "s", points, gates=True), **more)


def noisy(levels: Sequence[float], seed: int, spread: float = 0.02) -> list[float]:
    """Step times on a machine that now and then is busy: log-normal, one in ten half as slow again."""
    draw = random.Random(seed)
    return [level * draw.lognormvariate(0, spread) * (1.5 if draw.random() < 0.1 else 1) for level in levels]


def test_what_happened_at_once_is_found_where_it_happened() -> None:
    found = segments(noisy([0.010] * 20 + [0.011] * 15, seed=1))
    assert len(found) == 2
    assert abs(found[1].start - 20) <= 1
    assert found[1].level / found[0].level == pytest.approx(1.1, rel=0.02)


def test_noise_is_split_as_rarely_as_the_penalty_says() -> None:
    """ALPHA is 1 %: of 200 series 2 are expected; 8 or more has probability below 0.2 %."""
    alarms = sum(len(segments(noisy([0.01] * 20, seed=seed))) > 1 for seed in range(200))
    assert alarms < 8


def test_the_penalty_is_that_of_the_best_split() -> None:
    """Ten values split perfectly in the middle: with ranks centred, 2 * 5 * 2.5^2 over their variance of 8.25."""
    assert penalty(2 * MIN_LEVEL) <= 2 * 5 * 2.5**2 / 8.25
    assert len(segments([1.0, 1.1, 1.2, 1.3, 1.4, 2.0, 2.1, 2.2, 2.3, 2.4])) == 2


def test_a_slower_level_fails_and_a_faster_one_does_not() -> None:
    up, down = noisy([0.010] * 20 + [0.011] * 20, seed=3), noisy([0.011] * 20 + [0.010] * 20, seed=3)
    assert judge_time(series(up)).status is Status.FAIL
    assert judge_time(series(down)).status is Status.PASS
    assert judge_time(series(up), floor=0.2).status is Status.PASS


def test_small_losses_add_up() -> None:
    """A third of a per cent a result, which no split need show, is 10 % after thirty."""
    creeping = noisy([0.010 * 1.0033**k for k in range(30)], seed=5, spread=0.004)
    finding = judge_time(series(creeping))
    assert finding.status is Status.FAIL
    assert "against the first 10 results" in finding.actual


def test_a_shared_cpu_gates_nothing() -> None:
    slow = noisy([0.010] * 12 + [0.012] * 12, seed=7)
    finding = judge_time(series(slow, gates=False))
    assert finding.status is Status.FAIL and finding.level.value == "INFO"


def test_too_few_results_say_so() -> None:
    finding = judge_time(series([0.01] * 9))
    assert finding.status is Status.SKIP and "9 results" in finding.actual


# -- the command -------------------------------------------------------------------------------------------------------


def stored(folder: Path, day: int, times: dict[str, float], *, wider: int = 0, **more: Any) -> None:
    """A results file of that day: one launch of each implementation; `wider`: bytes more a rank."""
    with Writer(folder / f"made-{day:03}.jsonl") as writer:
        writer.write(about(day, **more))
        for name, seconds in times.items():
            case = Case(name, name, "gpt-tiny", 4, "bf16")

            def change(s: Any, seconds: float = seconds) -> Any:
                held = [replace(h, claimed={k: v + wider for k, v in h.claimed.items()}) for h in s.holdings]
                return replace(s, times_s=(seconds,) * 3, holdings=tuple(held))

            writer.write(replace(record(case=case, change=change), suite="made", provenance=f"p{day}"))


def judged(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["history", str(tmp_path), "--json", str(tmp_path / "out.json"), *arguments])
    lines = (tmp_path / "out.json").read_text().splitlines()
    return code, {f["id"]: f for f in map(json.loads, lines)}


def test_an_upgrade_that_costs_time_and_bytes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(16):
        late = day >= 8
        slow = 1.0 if day % 2 else 1.1  # the machine: both alike
        times = {"torch-ddp": 0.010 * slow, "zero2": (0.012 if late else 0.011) * slow * (1 + day / 1e4)}
        stored(tmp_path, day, times, **GPU | {"torch": "2.14.0" if late else "2.13.0"})
    stored(tmp_path, 16, {"torch-ddp": 0.010, "zero2": 0.0121}, wider=2, **GPU | {"torch": "2.14.0"})
    code, found = judged(tmp_path)
    out = capsys.readouterr().out
    time = found["made::zero2/gpt-tiny/n4/bf16@plain::history.time"]
    assert code == 1 and time["status"] == "fail"
    assert "of torch-ddp" in time["actual"]
    assert "torch 2.13.0 to 2.14.0" in " ".join(time["detail"])
    assert found["made::torch-ddp/gpt-tiny/n4/bf16@plain::history.time"]["status"] == "pass"
    exact = found["made::zero2/gpt-tiny/n4/bf16@plain::history.exact"]
    assert exact["status"] == "fail" and "+2, from" in exact["actual"]
    assert "▁" in out and "17 results" in out


def test_what_was_accepted_can_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(20):
        stored(tmp_path, day, {"zero2": (0.010 if day < 8 else 0.012) * (1 + day / 1e4)}, **GPU)
    assert judged(tmp_path)[0] == 1
    assert judged(tmp_path, "--since", "2026-01-09")[0] == 0
    assert main(["history", str(tmp_path), "--since", "yesterday"]) == 2
    assert "write a date" in capsys.readouterr().err


def test_a_folder_without_results_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(tmp_path)]) == 2
    assert "no results" in capsys.readouterr().err


def test_permutations_have_no_level() -> None:
    """The penalty is of ranks alone: any monotone change of the values leaves the levels where they are."""
    values = noisy([0.01] * 10 + [0.02] * 10, seed=11)
    starts = [s.start for s in segments(values)]
    assert starts == [s.start for s in segments(list(np.log(values)))]
