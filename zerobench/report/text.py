"""Words on a terminal: columns that line up, colour only where it is seen, nothing of a stranger's that moves the
cursor."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from typing import TextIO

_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def colourful(stream: TextIO) -> bool:
    """Whether `stream` shows colour: a terminal that is not dumb; NO_COLOR and FORCE_COLOR have the last word."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def paint(text: str, colour: str, on: bool) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on and colour else text


def clean(text: str) -> str:
    """`text` with control characters spelled out, so that no name or message can move the cursor, clear the screen or
    turn the line round."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _moves(unicodedata.category(c)) else repr(c)[1:-1] for c in text)


def on_line(text: str) -> str:
    """`clean`, and what would begin another line or move to the next column spelled out as well: for a name, which must
    not be able to add a line that reads as ours."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def below(text: str, indent: int) -> str:
    """`clean`; all lines but the first are set in, under where the first begins."""
    return clean(text).replace("\n", "\n" + " " * indent)


def _moves(category: str) -> bool:
    """Of control, format, unassigned and private characters, and of separators of lines and paragraphs."""
    return category[0] == "C" or category in ("Zl", "Zp")


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), gap: str = "  ") -> list[str]:
    """Rows (the first is the heading) as lines with columns that line up; columns in `right` are set to the right."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(cells).rstrip())
    return lines
