"""Waterfalls as a chart, by matplotlib, which is imported only here and only when a chart is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobench.explain.waterfall import Kind, Waterfall
from zerobench.report.explain import share_text
from zerobench.report.text import on_line
from zerobench.units import nbytes_text

SUFFIXES = (".svg", ".png")
COLOURS = {
    Kind.LAW: "#4c72b0",
    Kind.CLAIM: "#55a868",
    Kind.MEASURED: "#8c8c8c",
    Kind.BOUND: "#ccb974",
    Kind.SURPLUS: "#c44e52",
    Kind.UNEXPLAINED: "#000000",
}


class NoPlot(Exception):
    """matplotlib is not installed; says what to do."""


def draw(waterfalls: Sequence[Waterfall], path: Path) -> None:
    """Write a figure with one panel a waterfall. Raises ValueError for a suffix that is neither .svg nor .png, NoPlot
    without matplotlib, OSError where the file cannot be written."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a chart is an {' or a '.join(SUFFIXES)} file")
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise NoPlot(f"a chart needs matplotlib ({error}): pip install 'zerobench[report]'") from None
    heights = [len(w.rows) + 2 for w in waterfalls]
    # The same records make the same bytes; a name with dollar signs in it is a name and no formula.
    with matplotlib.rc_context({"svg.hashsalt": "zerobench", "text.parse_math": False}):
        figure = figures.Figure(figsize=(11, 0.32 * sum(heights) + 0.6 * len(heights)), layout="constrained")
        panels = figure.subplots(len(waterfalls), 1, squeeze=False, height_ratios=heights)
        for panel, waterfall in zip(panels[:, 0], waterfalls, strict=True):
            _panel(panel, waterfall)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _panel(panel: Any, waterfall: Waterfall) -> None:
    at = 0
    names = []
    for y, row in enumerate(waterfall.rows):
        panel.barh(y, row.nbytes / waterfall.psi, left=at / waterfall.psi, color=COLOURS[row.kind])
        at += row.nbytes
        sign = "-" if row.nbytes < 0 else ""
        names.append(f"{on_line(row.name)[:80]}  {sign}{nbytes_text(abs(row.nbytes))}")
    last = len(waterfall.rows)
    panel.barh(last, waterfall.total / waterfall.psi, color=COLOURS[Kind.LAW], alpha=0.4)
    panel.set_yticks(range(last + 1), [*names, f"measured  {nbytes_text(waterfall.total)}"])
    panel.invert_yaxis()
    panel.set_xlabel("bytes a parameter (Psi)")
    panel.set_title(
        f"{on_line(waterfall.run)[:120]}, {waterfall.moment}, rank {waterfall.rank}: {share_text(waterfall)} unexplained",
        fontsize=10,
    )
