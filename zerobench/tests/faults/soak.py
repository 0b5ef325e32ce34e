"""A run of many equal cases, in a process of its own: python -m zerobench.tests.faults.soak COUNT FOLDER."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

from zerobench.case import Case
from zerobench.runner import Plan, execute
from zerobench.tests.faults.bench import FAULTY


def main(count: int, folder: Path) -> int:
    """Judges `count` cases that differ in their names alone; the results file lies in `folder`."""
    cases = tuple(Case("faulty", FAULTY, "mlp-tiny", 2, options={"victim": i}) for i in range(count))
    plan = Plan("soak", cases, ("traffic.volume", "memory.at_rest"), "claim", (), "", deadline_s=60.0)
    with open(folder.with_name("said.txt"), "w", encoding="utf-8") as said, contextlib.redirect_stdout(said):
        done = execute(plan, Namespace(results=str(folder), resume=None, quiet=True, strict=False, trace=False))
    return done.verdict.exit_code()


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2])))
