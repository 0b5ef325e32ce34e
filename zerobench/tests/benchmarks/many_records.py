"""What judging, comparing and rendering a hundred thousand records takes: `python -m zerobench.tests.benchmarks.many_records`.

A record is one launch of one case with all of its ranks, as `zerobench run` writes it: a line of a results file. A suite
has at most 20,000 cases, so a file of 100,000 records has launches: 2,000 cases, each launched 50 times, unless
`--launches` says otherwise (5 of 20,000 cases is the widest there can be).

The lines come from a real run of this tree, of the shortest cases there are: one step of `mlp-tiny` watched and seven
timed, five implementations, n = 1 and 2, fp32 and bf16; a record of these has 4 to 22 kB. Each of the 20 is written at
`--sizes` sizes (a model k times as large: every count of elements and bytes times k, digests of its own) and under several
names of an option that changes nothing. Launches of a case differ as real ones do: in their seconds, and in what the
allocator counts. Larger models and worlds have more calls: what takes time then is bytes, so bytes are said.

Each command runs as a user would run it, in a process of its own, and the best of `--repeat` counts: seconds are the wall's,
those of the processor stand beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerobench.units import nbytes_text

SUITE = """\
version: 1
suite: many
matrix:
  implementation: [ddp, zero1, zero2, zero3, torch-ddp]
  model: [mlp-tiny]
  world_size: [1, 2]
  precision: [fp32, bf16]
steps: {warmup: 0, measured: 1}
checks: [memory.at_rest, traffic.volume, time.step]
"""
MOST_S, MOST_NBYTES = 5.0, 500e6
COUNTED = frozenset(
    {"numel", "nbytes", "psi", "units", "parameters", "bucket_numel", "claimed", "dtypes", "live", "bare", "unclaimed"}
    | {"backend", "updated_numel", "allocator", "padding_numel"}
)
"""The keys of a record under which numbers are elements or bytes."""

Json = dict[str, Any]


def real_run(folder: Path) -> Path:
    """The results file of a run of SUITE, made now."""
    suite = folder / "many.yaml"
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "zerobench", "run", str(suite), "--results", str(folder / "real"), "-q"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"the real run did not pass: exit code {done.returncode}\n{done.stderr[-2000:]}")
    (path,) = (folder / "real").glob("*.jsonl")
    return path


def scaled(value: Any, k: int, counted: bool = False) -> Any:
    """`value` with every count of elements and bytes times k, and digests of its own."""
    if isinstance(value, dict):
        if str(value.get("dtype")).startswith("int"):  # a call of control traffic, which does not grow with the model
            return value
        out = {name: scaled(item, k, counted or name in COUNTED) for name, item in value.items()}
        if "what" in value and isinstance(value.get("value"), str):
            out["value"] = hashlib.sha256(f"{value['value']} {k}".encode()).hexdigest()[: len(value["value"])]
        return out
    if isinstance(value, list):
        return [scaled(item, k, counted) for item in value]
    return value * k if counted and type(value) is int else value


def launched(body: Json, case: Json, chance: random.Random) -> Json:
    """`body` once more, for `case`, with what differs between launches: seconds, and an allocator with some blocks more."""
    launch = body["launch"]
    own = {
        "times_s": [[t * chance.uniform(0.9, 1.1) for t in times] for times in launch["times_s"]],
        "run_s": [run_s * chance.uniform(0.9, 1.1) for run_s in launch["run_s"]],
        "allocator": [[count + 16 * chance.randrange(500) for count in counts] for counts in launch["allocator"]],
    }
    wall_s = body["wall_s"] * chance.uniform(0.9, 1.1)
    return body | {"run": body["run"] | {"case": case}, "wall_s": wall_s, "launch": own}


def lines(source: Path, records: int, sizes: int, launches: int) -> Iterator[Json]:
    """A provenance and then `records` records, launch by launch as a run makes them."""
    about, *real = [json.loads(line) for line in source.read_text().splitlines()]
    names = max(1, records // (launches * sizes * len(real)))
    cases: list[tuple[Json, Json]] = []  # a scaled record, and the case that it is written for
    for k in range(1, sizes + 1):
        for each in real:
            body = scaled(each["record"], k)
            cases += [
                (body, body["run"]["case"] | {"model": f"mlp-{k}", "options": {"name": f"o{i}"}}) for i in range(names)
            ]
    chance = random.Random(1)
    yield {"provenance": about["provenance"] | {"cases": [case for _, case in cases]}}
    for written in range(records):
        body, case = cases[written % len(cases)]
        yield {"record": launched(body, case, chance)}


def write(source: Path, path: Path, records: int, sizes: int, launches: int) -> None:
    with path.open("w", encoding="utf-8") as out:
        for line in lines(source, records, sizes, launches):
            out.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")


def measured(command: list[str]) -> tuple[float, float, int]:
    """Processor and wall seconds of a command of zerobench, and its peak resident bytes."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerobench", *command], stdout=subprocess.DEVNULL, stderr=said, env=_plain()
        )
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{said.read().decode()[-2000:]}")
    return used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss * 1024


def _plain() -> dict[str, str]:
    """The environment without what would make a command write elsewhere too."""
    return {name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000, metavar="N", help="lines to write (default 100,000)")
    parser.add_argument("--launches", type=int, default=50, metavar="K", help="of each case (default 50)")
    parser.add_argument("--sizes", type=int, default=20, metavar="K", help="sizes of the model (default 20)")
    parser.add_argument("--repeat", type=int, default=3, metavar="K", help="times of each command (default 3)")
    parser.add_argument("--from", dest="source", type=Path, metavar="RESULT", help="a run made before, not a new one")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the files there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "many.jsonl"
        write(arguments.source or real_run(folder), path, arguments.records, arguments.sizes, arguments.launches)
        nbytes = path.stat().st_size
        print(f"{arguments.records} records, {nbytes_text(nbytes)}, {nbytes // arguments.records} bytes a record")
        base, page, text = str(folder / "baselines"), str(folder / "page.html"), str(folder / "page.md")
        print(f"{'command':<28}{'processor s':>12}{'wall s':>9}{'peak MB':>9}", flush=True)
        fits = True
        for name, command in (
            ("report: judge and print", ["report", str(path)]),
            ("report --markdown", ["report", str(path), "--markdown", text]),
            ("report --html", ["report", str(path), "--html", page]),
            ("accept: store a baseline", ["accept", str(path), "--baselines", base]),
            ("compare: with that baseline", ["compare", str(path), base]),
        ):
            cpu_s, wall_s, peak = min((measured(command) for _ in range(arguments.repeat)), key=lambda row: row[1])
            fits = fits and wall_s <= MOST_S and peak <= MOST_NBYTES
            print(f"{name:<28}{cpu_s:>12.2f}{wall_s:>9.2f}{peak / 1e6:>9.0f}", flush=True)
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{'within' if fits else 'ABOVE'} {MOST_S:.0f} s and {MOST_NBYTES / 1e6:.0f} MB a command; {load}")
    return 0 if fits else 1


if __name__ == "__main__":
    raise SystemExit(main())
