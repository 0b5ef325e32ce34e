"""What `zerobench report` writes beside what it prints: a page, and Markdown."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.case import Case
from zerobench.commands_info import fail, write_lines
from zerobench.finding import Verdict
from zerobench.store import Results

if TYPE_CHECKING:
    from zerobench.report.pen import Pen


def write(arguments: Namespace, results: Results, cases: Sequence[Case], verdict: Verdict, pen: Pen | None) -> int:
    """Write what the command line asks for; 0, or the exit code of what kept it from that, said on standard error. pen:
    what draws a page."""
    about, source = results.provenance, shlex.quote(str(arguments.result))
    try:
        if arguments.html:
            from zerobench.report.charts import NoMatplotlib
            from zerobench.report.page import html

            by = arguments.judge or about.judge
            try:
                page = html(
                    about,
                    cases,
                    results.records,
                    results.launches,
                    verdict,
                    judged_by=by,
                    source=source,
                    pen=pen,
                )
            except NoMatplotlib as error:
                return fail(str(error))
            Path(arguments.html).write_text(page, encoding="utf-8")
        if arguments.markdown:
            from zerobench.report.run_markdown import run_lines

            write_lines(arguments.markdown, run_lines(verdict, cases, results.records, about, source))
    except OSError as error:
        return fail(f"{error.filename}: cannot be written: {error.strerror}; name another file", 3)
    return 0
