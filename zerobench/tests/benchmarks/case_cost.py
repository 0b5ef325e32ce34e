"""What does a case cost beyond its training? A suite's cases from a warm fork server, and one torchrun a case.

    python -m zerobench.tests.benchmarks.case_cost [--torchrun 3]

Columns, in seconds a case: `wall`, the whole suite's time over its cases, with records written and judged; `ranks`,
from a rank's first line to its last, the slowest rank of each case; `beyond`, the difference: births, rendezvous,
merging, writing, judging, ends. `training` is the time that the same steps take in a hand-written script, so `all but
training` also has what the ranks do for the sake of measuring: joining, probes, comparisons. The requirement, at most
0.5 s beyond, is about a machine that does nothing else; the load average is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zerobench.case import Case
from zerobench.judge import judge
from zerobench.launch.local import Local
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.text import table
from zerobench.scenarios import SCENARIOS
from zerobench.stats import median
from zerobench.store import Writer

IMPLEMENTATIONS = ("ddp", "zero1", "zero2", "zero3", "torch-ddp")
MODELS = ("mlp-tiny", "gpt-tiny")
CHECKS = ("memory.at_rest", "traffic.volume", "time.step")
MOST_BEYOND_S = 0.5


def from_fork_server(cases: list[Case]) -> tuple[float, list[Record]]:
    """Seconds for all cases, the fork server warm, and their records."""
    with tempfile.TemporaryDirectory() as folder, Local() as local:
        local.launch(cases[0].run("plain"), deadline_s=120)  # torch is imported, files are in the page cache
        records = []
        began = time.perf_counter()
        about = collect(suite="case-cost", suite_digest="")
        with Writer(Path(folder) / "results.jsonl") as writer:
            writer.write(about)
            for case in cases:
                records.append(local.launch(case.run("plain"), deadline_s=120))
                writer.write(records[-1])
        verdict = judge("case-cost", cases, CHECKS, {record.id: record for record in records})
        wall_s = time.perf_counter() - began
    if code := verdict.exit_code():
        raise SystemExit(f"the cases themselves did not pass: exit code {code}")
    return wall_s, records


def from_torchrun(case: Case) -> tuple[float, float]:
    """Seconds of one torchrun that trains the same steps, and of its training."""
    steps = case.warmup + case.measured + 1 + SCENARIOS["plain"].timed
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.world_size}"]
    script = ["-m", "zerobench.tests.benchmarks.plain_ranks", case.implementation, case.model, str(steps)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    began = time.perf_counter()
    done = subprocess.run([*torchrun, *script], capture_output=True, text=True, timeout=300, env=environ, check=False)
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"torchrun: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return wall_s, float(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchrun", type=int, default=3, metavar="K", help="how many cases torchrun does as well")
    arguments = parser.parse_args()
    cases = [Case(name, name, model, 2) for name in IMPLEMENTATIONS for model in MODELS]
    load = os.getloadavg()[0]
    wall_s, records = from_fork_server(cases)
    ranks_s = [max(sample.run_s for sample in record.samples) for record in records]
    wall, ranks = wall_s / len(cases), sum(ranks_s) / len(cases)
    by_hand = [from_torchrun(case) for case in cases[: arguments.torchrun]]
    rows = [("launched by", "cases", "wall", "ranks", "beyond", "training", "all but training")]
    training = median([t for _, t in by_hand]) if by_hand else None
    others = ("", "") if training is None else (f"{training:.3f}", f"{wall - training:.3f}")
    rows.append(("fork server", str(len(cases)), f"{wall:.3f}", f"{ranks:.3f}", f"{wall - ranks:.3f}", *others))
    if training is not None:
        one = median([w for w, _ in by_hand])
        rows.append(("torchrun", str(len(by_hand)), f"{one:.3f}", "", "", f"{training:.3f}", f"{one - training:.3f}"))
    print("\n".join(table(rows, right=range(1, 7))))
    fits = wall - ranks <= MOST_BEYOND_S
    print(f"\n{wall - ranks:.3f} s a case beyond its ranks, {'within' if fits else 'ABOVE'} {MOST_BEYOND_S} s")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    return 0 if fits else 1


if __name__ == "__main__":
    raise SystemExit(main())
