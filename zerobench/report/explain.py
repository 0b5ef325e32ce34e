"""A waterfall as a table: from the formula down to what was measured, the unexplained rest last, with its share."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.explain.waterfall import Kind, Row, Waterfall
from zerobench.report.text import on_line, paint, table
from zerobench.units import significant_text

WIDTH = 24
MARKS = {Kind.BOUND: "<=", Kind.SURPLUS: "!", Kind.UNEXPLAINED: "?"}
COLOURS = {Kind.SURPLUS: "red", Kind.UNEXPLAINED: "yellow"}
KEY = "<= up to what the claims allow   ! named, and nobody claims or allows it   ? unexplained"


def explain_lines(waterfalls: Sequence[Waterfall], colour: bool) -> list[str]:
    """Each waterfall under its title; then what the marks mean."""
    lines: list[str] = []
    for waterfall in waterfalls:
        lines += [*_lines(waterfall, colour), ""]
    return [*lines, KEY]


def _lines(waterfall: Waterfall, colour: bool) -> list[str]:
    rows = [("", "", "bytes", "Psi", "", "from")]
    low, high = extent(waterfall)
    at = 0
    for row in waterfall.rows:
        bar = _bar(at, at + row.nbytes, low, high)
        rows.append((MARKS.get(row.kind, ""), row.name, f"{row.nbytes:,}", _psi(row, waterfall), bar, row.why))
        at += row.nbytes
    rest = rows.pop()
    total = ("=", "measured", f"{waterfall.total:,}", f"{waterfall.total / waterfall.psi:.3f}", "", waterfall.what)
    lines = table([tuple(on_line(cell) for cell in row) for row in (*rows, total, rest)], right=(2, 3))
    kinds = [None, *(row.kind for row in waterfall.rows[:-1]), None, Kind.UNEXPLAINED]
    painted = [
        paint(line, COLOURS[kind], colour) if kind in COLOURS else line for line, kind in zip(lines, kinds, strict=True)
    ]
    return [
        paint(f"{on_line(waterfall.run)}, {waterfall.moment}, rank {waterfall.rank}", "bold", colour),
        *painted,
        f"unexplained: {share_text(waterfall)} of what was measured",
        *(f"not told: {on_line(words)}" for words in waterfall.absent),
    ]


def share_text(waterfall: Waterfall) -> str:
    return f"{significant_text(100 * waterfall.share)} %"


def extent(waterfall: Waterfall) -> tuple[int, int]:
    """The lowest and the highest level that the running sum reaches, 0 included."""
    levels = [0]
    for row in waterfall.rows:
        levels.append(levels[-1] + row.nbytes)
    return min(levels), max(levels)


def _psi(row: Row, waterfall: Waterfall) -> str:
    return f"{row.nbytes / waterfall.psi:+.3f}" if row.kind is not Kind.LAW else f"{row.nbytes / waterfall.psi:.3f}"


def _bar(start: int, stop: int, low: int, high: int) -> str:
    """Where the running sum goes from `start` to `stop`: "#" up, "-" down, at least one mark for any change."""
    if start == stop or low == high:
        return "".ljust(WIDTH)
    a, b = (round((level - low) * WIDTH / (high - low)) for level in sorted((start, stop)))
    a = min(a, WIDTH - 1)
    return (" " * a + ("#" if stop > start else "-") * max(1, b - a)).ljust(WIDTH)
