"""Coverage-guided fuzzing of all that reads a stranger's file: `python -m zerobench.tests.faults.fuzz`, or `tox -e fuzz`.

A process a target (see `targets.py`), each guided by the edges that its inputs reach in zerobench and in the YAML reader,
by atheris over libFuzzer. Half of all inputs are changed by their form, half byte by byte. What a target raises is a
finding: it is kept as a file, once for each place that raises, and the search goes on. Exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

NAMES = ("yaml", "suite", "xfails", "record", "results", "baseline", "units")
WEIGHTS = {"results": 3, "suite": 2, "baseline": 2}  # shares of the time; 1 for the others
SLOW_S = 5.0
MOST_NBYTES = 200_000
GUIDED = ("zerobench", "yaml")
"""Packages whose edges guide the search."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zerobench.tests.faults.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="in all (default 600)")
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; may repeat")
    parser.add_argument("--findings", metavar="DIR", default="fuzz-findings", help="default fuzz-findings/")
    parser.add_argument("--corpus", metavar="DIR", help="inputs to begin with and to add to (default: none)")
    parser.add_argument("--alone", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    findings = Path(arguments.findings)
    if arguments.alone:
        search(arguments.alone, findings, Path(arguments.corpus), arguments.seconds)
        return 0
    targets = arguments.target or list(NAMES)
    total = sum(WEIGHTS.get(name, 1) for name in targets)
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files of a target are written at each input
    with tempfile.TemporaryDirectory(prefix="zerobench-fuzz-", dir=shared) as own:
        for name in targets:
            corpus = Path(arguments.corpus or own) / name
            corpus.mkdir(parents=True, exist_ok=True)
            seconds = arguments.seconds * WEIGHTS.get(name, 1) / total
            print(child(name, findings, corpus, seconds, own), flush=True)
    found = sorted(findings.glob("*.txt"))
    for path in found:
        print(f"{path}: {path.read_text().strip().splitlines()[-1][:300]}")
    print(f"{len(found)} findings")
    return 1 if found else 0


def child(name: str, findings: Path, corpus: Path, seconds: float, own: str) -> str:
    """One target in a process of its own, which libFuzzer ends without Python's clearing up: what it leaves is in `own`,
    which goes. What it came to, in a line."""
    began = time.monotonic()
    words = [sys.executable, "-m", __spec__.name, "--alone", name, "--seconds", str(seconds)]
    words += ["--findings", str(findings), "--corpus", str(corpus)]
    environ = os.environ | {"TMPDIR": own}
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds + 120, env=environ)
    rows = re.findall(r"^#(\d+)\s+(INITED|DONE)\s+cov: (\d+) ft: (\d+)", done.stderr, re.MULTILINE)
    if not rows or rows[-1][1] != "DONE":
        findings.mkdir(parents=True, exist_ok=True)
        (findings / f"{name}-ended.txt").write_text(done.stderr[-4000:])
        return f"{name}: the search itself ended with {done.returncode}: {done.stderr[-300:]}"
    (_, _, first, _), (count, _, last, features) = rows[0], rows[-1]
    spent = time.monotonic() - began
    return (
        f"{name}: {int(count):,} inputs in {spent:.0f} s; {first} edges by what is right, {last} by all that was tried, "
        f"{features} features; {len(list(findings.glob(f'{name}-*.txt')))} findings"
    )


def search(name: str, findings: Path, corpus: Path, seconds: float) -> None:
    """Does not return: libFuzzer ends the process when the time is over."""
    import atheris

    for loaded in [m for m in sys.modules if m.split(".")[0] in GUIDED and not m.startswith("zerobench.tests")]:
        del sys.modules[loaded]  # imported before it could be watched
    with atheris.instrument_imports(include=list(GUIDED)):
        targets: Any = importlib.import_module("zerobench.tests.faults.targets")
    target, chance = targets.TARGETS[name][0], random.Random(1)
    for i, seed in enumerate(targets.seeds(name)):
        (corpus / f"right-{i}").write_bytes(seed)

    def once(raw: bytes) -> None:
        began = time.monotonic()
        try:
            target(raw)
            assert time.monotonic() - began < SLOW_S, f"slow: {time.monotonic() - began:.1f} s"
        except Exception as error:
            keep(name, raw, error, findings)

    def change(raw: bytes, most: int, seed: int) -> bytes:
        chance.seed(seed)
        if chance.random() < 0.5:
            raw = targets.changed(name, raw, chance)
        else:
            raw = atheris.Mutate(raw, min(most, MOST_NBYTES))
        return raw[:most]

    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={MOST_NBYTES}",
        "-timeout=30",
        "-rss_limit_mb=4096",
    ]
    atheris.Setup([name, *options, str(corpus)], once, custom_mutator=change)
    atheris.Fuzz()


def keep(name: str, raw: bytes, error: Exception, findings: Path) -> None:
    """The input and the traceback, once for each place in zerobench that raises."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "zerobench" in f.filename and "tests" not in f.filename] or frames
    place = f"{Path(ours[-1].filename).stem}-{ours[-1].lineno}-{type(error).__name__}"
    findings.mkdir(parents=True, exist_ok=True)
    if not (path := findings / f"{name}-{place}.txt").exists():
        path.with_suffix(".bin").write_bytes(raw)
        path.write_text("".join(traceback.format_exception(error)), errors="replace")


if __name__ == "__main__":
    raise SystemExit(main())
