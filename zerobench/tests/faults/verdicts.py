"""What an undisturbed run of the short suite says, and whether a disturbed one, gone on with, says the same."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

from zerobench.store import begun
from zerobench.tests.faults.bench import Bench
from zerobench.tests.faults.row import Wrong

SUITE = ("run", "short.yaml", "--deadline", "300")  # what is tried here is not the deadline
RUNS = 4  # of the short suite
Verdict = tuple[tuple[str, str], ...]


def undisturbed(bench: Bench) -> Verdict:
    """(finding, status) of each, in order."""
    return _undisturbed(bench)[0]


def undisturbed_s(bench: Bench) -> float:
    """How long such a run takes, from the start of the interpreter to its end."""
    return _undisturbed(bench)[1]


@cache
def _undisturbed(bench: Bench) -> tuple[Verdict, float]:
    alone = bench.apart("undisturbed")
    began = time.monotonic()
    verdict = run(alone, ())
    return verdict, time.monotonic() - began


def run(bench: Bench, more: tuple[str, ...]) -> Verdict:
    """The verdict of the short suite, which must pass. Raises `Wrong`."""
    code, out, err = bench.run(*SUITE, "--json", "verdict.json", *more)
    if code:
        raise Wrong("wrong verdict", f"exit code {code} of a run that nothing disturbed: {(out + err)[-600:]}")
    return read(bench.folder / "verdict.json")


def read(path: Path) -> Verdict:
    return tuple((f["id"], f["status"]) for f in map(json.loads, path.read_text().splitlines()))


def resumed(bench: Bench, path: Path) -> None:
    """`--resume` on what is left ends as the undisturbed run did. Raises `Wrong`."""
    if run(bench, ("--resume", str(path))) != undisturbed(bench):
        raise Wrong("wrong verdict", f"resuming {path.name} ends otherwise than an undisturbed run")


def kept(path: Path, said: str) -> int:
    """How many runs are in the file; each that was told as done ("[2/4] <id>  0.31 s") must be there, whole."""
    found = begun(path)
    have = set(found.records) if found else set()
    told = {line.split()[1] for line in said.splitlines() if line.startswith("[") and "/" in line.split()[0]}
    if lost := told - have:
        raise Wrong("case lost", f"told as done, and not in {path.name}: {sorted(lost)}")
    return len(have)
