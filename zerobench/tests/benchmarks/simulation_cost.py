"""What a simulation costs: processor seconds and memory of one rank against parameters, depth and ranks.

    python -m zerobench.tests.benchmarks.simulation_cost --write results

Each point is a process of its own that does one plain run of two steps; seconds are its processor's, so that other load
on the machine counts little. Writes simulation.json and simulation.svg. `--at-scale RESULT` writes simulation.md as well:
Table 1 of the ZeRO paper as the suite at-scale measured it, beside what the paper prints.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = (256, 1024, 4096, 16384, 65536)
DEPTHS = (4, 8, 16, 32, 64)
RANKS = (2, 16, 128, 1024)
STAGES = ("zero2", "zero3")
WIDTH, DEPTH, N = 4096, 8, 64
AXES = {"parameters": "parameters, at depth 8 on 64 ranks", "depth": "depth, 64 ranks", "ranks": "ranks, at depth 8"}


def points() -> Iterator[dict[str, Any]]:
    for stage in STAGES:
        for axis, values in (("parameters", WIDTHS), ("depth", DEPTHS), ("ranks", RANKS)):
            for value in values:
                point = {"axis": axis, "stage": stage, "width": WIDTH, "depth": DEPTH, "n": N}
                yield point | {{"parameters": "width", "depth": "depth", "ranks": "n"}[axis]: value}


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """One run in this process, which ends with it."""
    import torch
    import torch._dynamo  # the first optimizer imports it; a fork server has done so before

    from zerobench.case import Case
    from zerobench.launch.simulate import PLACE
    from zerobench.models.sizes import SIZES
    from zerobench.rank import RankContext
    from zerobench.simulation import work

    torch.set_num_threads(1)
    width, depth, n = point["width"], point["depth"], point["n"]
    sizes = {"vocabulary": 32768, "width": width, "heads": width // 64, "depth": depth, "context": 1024, "examples": 1}
    SIZES["measured"] = ("gpt", sizes)  # type: ignore[index]
    stage = point["stage"]
    run = Case(stage, stage, "measured", n, "fp16", measured=1, launch="simulate").run("plain")
    context = RankContext(0, n, "fake", "cpu", lambda: None, lambda text: None, Path("."), place=PLACE)
    before = time.process_time()
    outcome = work.work(run, context)
    assert outcome.status == "ok" and outcome.model is not None, outcome.reason
    return point | {
        "psi": outcome.model.psi,
        "cpu_s": round(time.process_time() - before, 3),
        "max_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerobench"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    keys = {"parameters": "psi", "depth": "depth", "ranks": "n"}
    for (axis, label), ax in zip(AXES.items(), axes, strict=True):
        for stage in STAGES:
            mine = [r for r in rows if (r["axis"], r["stage"]) == (axis, stage)]
            ax.plot([r[keys[axis]] for r in mine], [r["cpu_s"] for r in mine], marker="o", label=stage)
        ax.set_xlabel(label)
        if axis != "depth":
            ax.set_xscale("log")
    axes[0].set_ylabel("processor seconds of one rank")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--at-scale", type=Path, metavar="RESULT")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(json.loads(arguments.point))))
        return
    if arguments.at_scale:
        from zerobench.tests.benchmarks.table_1 import page

        (arguments.write / "simulation.md").write_text(page(arguments.at_scale))
        return
    rows = []
    for point in points():
        command = [sys.executable, "-m", "zerobench.tests.benchmarks.simulation_cost", "--point", json.dumps(point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    (arguments.write / "simulation.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    draw(rows, arguments.write / "simulation.svg")


if __name__ == "__main__":
    main()
