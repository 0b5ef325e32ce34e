"""Try every fault, print a line each, and write the figures: `python -m zerobench.tests.faults`, or `tox -e faults`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from zerobench import interrupt
from zerobench.report.text import clean
from zerobench.tests.faults.bench import Bench
from zerobench.tests.faults.matrix import counts, markdown, rows
from zerobench.tests.faults.row import KINDS, Result, tried


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zerobench.tests.faults", description=__doc__)
    parser.add_argument("-k", "--select", default="", metavar="WORD", help="only rows with this in their name")
    parser.add_argument("--quick", action="store_true", help="the rows that the ordinary tests try")
    parser.add_argument("--markdown", metavar="FILE", help="write the matrix there")
    arguments = parser.parse_args()
    todo = [row for row in rows() if row.quick or not arguments.quick]
    todo = [row for row in todo if arguments.select in f"{row.chapter}: {row.name}"]
    began, results = time.monotonic(), list[Result]()
    with (
        interrupt.listening(),
        tempfile.TemporaryDirectory(prefix="zerobench-faults-") as folder,
        Bench(Path(folder) / "bench", whole=not arguments.quick) as bench,
    ):
        for row in todo:
            result = tried(row, bench)
            results.append(result)
            word = ", ".join(result.wrong).upper() or ("not tried" if result.skipped else "survived")
            print(f"{word:9}  {result.seconds:5.1f} s  {row.chapter}: {row.name}: {clean(result.seen)}", flush=True)
    sums = counts(results)
    print(", ".join(f"{sums[word]} {word}" for word in ("tried", "survived", *KINDS)))
    if arguments.markdown:
        lines = markdown(results, time.monotonic() - began, len(rows()))
        Path(arguments.markdown).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
