"""The whole matrix: every row there is, the counts, and the page that shows them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import zerobench
from zerobench.provenance import cores, cpu_model
from zerobench.report.text import clean
from zerobench.tests.faults import (
    disk_rows,
    page_rows,
    parent_rows,
    place_rows,
    plugin_rows,
    rank_rows,
    reach_rows,
    soak_rows,
    stranger_rows,
)
from zerobench.tests.faults.row import KINDS, Result, Row

CHAPTERS = (
    rank_rows,
    parent_rows,
    disk_rows,
    reach_rows,
    place_rows,
    plugin_rows,
    stranger_rows,
    page_rows,
    soak_rows,
)
SEEN_CHARACTERS = 400


def rows() -> list[Row]:
    return [row for chapter in CHAPTERS for row in chapter.rows()]


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Faults tried and survived, and how often each kind of wrong came about."""
    tried = [r for r in results if not r.skipped]
    out = {"tried": sum(r.times for r in tried), "survived": sum(r.times for r in tried if not r.wrong)}
    return out | {kind: sum(kind in r.wrong for r in tried) for kind in KINDS}


def markdown(results: Sequence[Result], seconds: float, of: int) -> list[str]:
    """The page: counts, then a table a chapter. of: the rows that the whole matrix has."""
    sums = counts(results)
    skipped = sum(r.skipped for r in results)
    lines = [
        "# Under faults",
        "",
        f"zerobench {zerobench.__version__}, torch {version('torch')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {cpu_model()}, {cores()} cores, "
        f"load {os.getloadavg()[0]:.1f}, {datetime.now(UTC):%Y-%m-%d}, {seconds / 60:.1f} minutes.",
        f"{len(results)} of the matrix's {of} rows. Made by `tox -e faults`; never edited by hand.",
        "",
        "| faults tried | survived | cases lost | processes left | files left | wrong verdicts | told badly | not tried here |",
        "|---|---|---|---|---|---|---|---|",
        f"| {sums['tried']} | {sums['survived']} | {sums['case lost']} | {sums['process left']} | {sums['file left']} "
        f"| {sums['wrong verdict']} | {sums['not told']} | {skipped} |",
        "",
        'A rank\'s fault is planted in a correct stage 2, on rank 1 of 2, in the second step; "collective" is between the',
        "issue of a collective and the wait for it. After each, the same launcher's next run must pass.",
    ]
    for chapter in dict.fromkeys(r.row.chapter for r in results):
        lines += ["", f"## {chapter[0].upper()}{chapter[1:]}", ""]
        lines += ["| fault | what happens | what the user sees | what is kept | |", "|---|---|---|---|---|"]
        for r in (r for r in results if r.row.chapter == chapter):
            word = "not tried" if r.skipped else ", ".join(r.wrong).upper() or "survived"
            cells = (r.row.name, r.row.done, _short(r.seen), r.row.kept, word)
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= SEEN_CHARACTERS else text[:SEEN_CHARACTERS] + " ..."


def _cell(text: str) -> str:
    """Nothing of a stranger's in a page: control characters spelled out, and what Markdown or HTML would take amiss."""
    text = clean(" ".join(text.split()))
    for character, spelled in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "'")):
        text = text.replace(character, spelled)
    return text
