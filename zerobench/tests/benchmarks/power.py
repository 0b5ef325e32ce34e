"""How often does A/B cry wolf, and how often does it sleep? Real steps of real ranks, slowed by real work.

    python -m zerobench.tests.benchmarks.power [--budget 900] [--repetitions 40] [--slowed 40] [--out results/power]

First the work is calibrated: in launches where every other step repeats a unit's forward, the two kinds of step stand
next to each other, and their ratio is the slowdown that really is there. Then the rule of `zerobench ab` runs in full,
launch by launch, again and again: on equal sides, and on sides that are slower by 2, 5, 10 and 20 %. Each comparison is
a line of JSON with its launches, so that the table can be made again (--table); a later run goes on with the file. Equal
sides are repeated --repetitions times and each slowdown --slowed times, all in turns, so that a run that stops early has
its share of each.

On a machine that does other things as well the load average is part of the result: it stands in every line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerobench.ab import Launches, measure
from zerobench.case import Case, Run
from zerobench.checks.pairs import Cell, cells_of
from zerobench.checks.timing import slowest
from zerobench.launch.local import Local
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.text import table
from zerobench.sequential import ALPHA, MOST_ROUNDS, Pairs, decide, wanted
from zerobench.stats import Change, median, paired_ratio

SUBJECT = "zerobench.tests.benchmarks.repeating:Repeating"
LEVELS = (0.0, 0.02, 0.05, 0.10, 0.20)
PROBE_REPEATS = 200
CALIBRATION_LAUNCHES = 12
REDRAWN = 2000
DEADLINE_S = 60.0


def run_of(model: str, repeats: int, every: int = 1) -> Run:
    options = {"repeats": repeats, "every": every} if repeats else {}
    return Case("repeating", SUBJECT, model, 2, options=options).run("timed")


def launched(local: Local, run: Run) -> Record:
    record = local.launch(run, deadline_s=DEADLINE_S, suite="power")
    if record.status != "ok":
        raise SystemExit(f"{record.id}: {record.status}: {record.reason}")
    return record


def on_and_off(record: Record) -> tuple[list[float], list[float]]:
    """Seconds of timed steps with the work and of those right after them without; one step of two has it."""
    case = record.run.case
    before = case.warmup + case.measured + 1  # steps of this engine that were not timed
    steps = slowest([sample.times_s for sample in record.samples])[before % 2 :]
    whole = len(steps) // 2 * 2
    return steps[:whole:2], steps[1:whole:2]


def calibrate(local: Local, model: str) -> list[dict[str, Any]]:
    """For each slowdown: the repeats, and the slowdown that they really make, with an interval over launches."""
    costs, bare = [], []
    for _ in range(CALIBRATION_LAUNCHES):
        on, off = on_and_off(launched(local, run_of(model, PROBE_REPEATS, every=2)))
        costs.append((median(on) - median(off)) / PROBE_REPEATS)
        bare.append(median(off))
    rows: list[dict[str, Any]] = [{"level": 0.0, "repeats": 0, "ratio": 1.0}]
    for level in LEVELS[1:]:
        repeats = max(1, round(level * median(bare) / median(costs)))
        ratios = []
        for _ in range(CALIBRATION_LAUNCHES):
            on, off = on_and_off(launched(local, run_of(model, repeats, every=2)))
            ratios.append(median([a / b for a, b in zip(on, off, strict=True)]))
        seen = paired_ratio([1.0] * len(ratios), ratios, 0.025)
        assert seen.interval is not None
        ends = {"low": seen.interval.low, "high": seen.interval.high}
        rows.append({"level": level, "repeats": repeats, "ratio": seen.ratio, **ends})
    return rows


def compare(local: Local, model: str, level: float, repeats: int) -> dict[str, Any]:
    """One comparison by the rule, as a line."""
    runs = [(run_of(model, 0), run_of(model, repeats))]
    launches: Launches = {"base": [], "head": []}
    load, began = os.getloadavg()[0], time.monotonic()
    measure(runs, lambda side, run, left: launched(local, run), launches, MOST_ROUNDS)
    cell: Cell = cells_of(launches, runs)[0]
    decision = decide({cell.name: cell.pairs})[cell.name]
    ratio = decision.ratio
    return {
        "level": level,
        "repeats": repeats,
        "change": decision.change.value,
        "ratio": ratio and ratio.ratio,
        "interval": ratio and ratio.interval and asdict(ratio.interval),
        "screened": decision.screened,
        "confirmed": decision.confirmed,
        "base_s": cell.pairs.base,
        "head_s": cell.pairs.head,
        "load": round(load, 2),
        "wall_s": round(time.monotonic() - began, 2),
    }


def redrawn(lines: Sequence[dict[str, Any]], draw: random.Random) -> Iterator[Change]:
    """The rule on runs of consecutive equal pairs as they were recorded, sides swapped at random within each pair: real
    noise, nothing changed, and as many comparisons as wanted."""
    pairs = equal_pairs(lines)
    longest = MOST_ROUNDS + 9
    if len(pairs) < longest:
        return
    for _ in range(REDRAWN):
        start = draw.randrange(len(pairs) - longest + 1)
        drawn = [p if draw.random() < 0.5 else p[::-1] for p in pairs[start : start + longest]]
        cell = Pairs(tuple(b for b, _ in drawn), tuple(h for _, h in drawn))
        assert len(cell) >= wanted({"": cell})[""]
        yield decide({"": cell})[""].change


def equal_pairs(lines: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(base, head) of all comparisons without a slowdown, in order."""
    return [p for line in lines if not line["level"] for p in zip(line["base_s"], line["head_s"], strict=True)]


def report(path: Path) -> str:
    """The table of a file of lines."""
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines:
        return f"{path}: no comparisons yet\n"
    rows = [("slowed by", "really", "comparisons", *(change.value for change in Change), "pairs", "load")]
    for made in head["calibration"]:
        mine = [line for line in lines if line["level"] == made["level"]]
        if not mine:
            continue
        counts = Counter(line["change"] for line in mine)
        really = "equal sides"
        if made["level"]:
            really = " to ".join(f"{100 * (made[end] - 1):+.1f} %" for end in ("low", "high"))
        shares = [f"{counts[change.value]} ({100 * counts[change.value] / len(mine):.0f} %)" for change in Change]
        pairs = f"{median([line['screened'] + line['confirmed'] for line in mine]):.0f}"
        load = f"{median([line['load'] for line in mine]):.1f}"
        rows.append((f"{100 * made['level']:.0f} %", really, str(len(mine)), *shares, pairs, load))
    spread = [math.log(h / b) for b, h in equal_pairs(lines)]
    again = Counter(redrawn(lines, random.Random(0)))
    alarms = again[Change.SLOWER] + again[Change.FASTER]
    middle = median([abs(s) for s in spread]) if spread else math.nan
    about = head["provenance"]
    return "\n".join(
        [
            "# Error rates of `zerobench ab`, measured",
            "",
            f"`{head['model']}` at n = 2, {about['cores']} cores ({about['cpu']}), torch {about['torch']}, "
            f"{about['started']}; median step {1e3 * median([t for line in lines for t in line['base_s']]):.2f} ms.",
            "",
            *markdown(rows),
            "",
            "`really`: 95 % interval of the slowdown, from steps with and without the work in turns within one launch.",
            "`pairs`: median number of pairs of launches until the rule was done. `load`: median one-minute load.",
            f"Half of the equal pairs differ by more than {100 * math.expm1(middle):.1f} %.",
            f"Sides of recorded equal pairs swapped at random, {sum(again.values())} comparisons redrawn: "
            f"{alarms} false alarms (allowed: {100 * ALPHA:.0f} %).",
            "",
        ]
    )


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["-" * max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [f"| {line} |" for line in table([rows[0], rule, *rows[1:]], gap=" | ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp-2m")
    parser.add_argument("--repetitions", type=int, default=40, help="comparisons of equal sides")
    parser.add_argument("--slowed", type=int, default=40, help="comparisons of each slowdown")
    parser.add_argument("--budget", type=float, default=900.0, metavar="S", help="start no comparison after so long")
    parser.add_argument("--out", type=Path, default=Path("results/power"))
    parser.add_argument("--table", action="store_true", help="only make the table again")
    arguments = parser.parse_args()
    path = arguments.out / f"{arguments.model}.jsonl"
    if not arguments.table:
        arguments.out.mkdir(parents=True, exist_ok=True)
        shares = {level: arguments.slowed if level else arguments.repetitions for level in LEVELS}
        fill(path, arguments.model, shares, time.monotonic() + arguments.budget)
    text = report(path)
    path.with_suffix(".md").write_text(text)
    print(text)


def fill(path: Path, model: str, repetitions: Mapping[float, int], until: float) -> None:
    """Append comparisons, levels in turn, until there are enough of each or it is too late."""
    with Local() as local, path.open("a") as out:
        if path.stat().st_size == 0:
            about = collect(suite="power", suite_digest="").to_json()["provenance"]
            head = {"model": model, "calibration": calibrate(local, model), "provenance": about}
            print(json.dumps(head), file=out, flush=True)
        head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        if head["model"] != model:
            raise SystemExit(f"{path}: is about {head['model']}")
        done = Counter(line["level"] for line in lines)
        shares = {made["level"]: repetitions[made["level"]] for made in head["calibration"]}
        while left := [made for made in head["calibration"] if done[made["level"]] < shares[made["level"]]]:
            if time.monotonic() > until:
                return
            made = min(left, key=lambda made: done[made["level"]] / shares[made["level"]])
            line = compare(local, model, made["level"], made["repeats"])
            print(json.dumps(line), file=out, flush=True)
            done[made["level"]] += 1


if __name__ == "__main__":
    main()
