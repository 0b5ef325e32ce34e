"""`--trace`: after the judged runs, each case's plain run once more, with one step followed event by event."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from zerobench.case import Run
from zerobench.launch.local import Local
from zerobench.report import trace
from zerobench.report.text import clean
from zerobench.trace_folder import TARGET, TRACE_FOLDER


def trace_runs(runs: Iterable[Run], folder: Path, *, deadline_s: float) -> int:
    """Launch each of `runs` and write its trace into `folder`; how many were written. One that does not finish is said
    on standard error. Raises LaunchError, and OSError where `folder` cannot be written."""
    written = 0
    with Local() as local:
        for run in runs:
            with tempfile.TemporaryDirectory(prefix="zerobench-trace-") as scratch:
                os.environ[TRACE_FOLDER] = scratch
                try:
                    record = local.launch(run, deadline_s=deadline_s, target=TARGET)
                finally:
                    del os.environ[TRACE_FOLDER]
                backend = record.samples[0].place.backend if record.samples else ""
                found = trace.merge_folder(run, Path(scratch), backend)
            if found is None:
                print(f"note: no trace of {clean(run.id)}: {clean(record.reason or record.status)}", file=sys.stderr)
                continue
            trace.write(found, folder / trace.file_name(run))
            written += 1
    return written
