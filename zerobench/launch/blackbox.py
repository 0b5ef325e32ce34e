"""What a rank was doing, in one line that outlives it.

The line is written into a file with one `pwrite`, a microsecond or two, and from then on belongs to the page cache:
SIGKILL cannot take it. It reads "<phase> of step <k>: <last collective>", or just a phase ("building the model").
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NBYTES = 1024
_LINE = re.compile(r"(?P<phase>.+?) of step (?P<step>-?\d+)(?:: (?P<call>.*))?", re.DOTALL)


class BlackBox:
    """The writing end, in the rank."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, text: str) -> None:
        """Replace the line. What does not fit into `NBYTES` bytes is cut off."""
        os.pwrite(self._fd, text.encode("utf-8", "replace")[:NBYTES].ljust(NBYTES, b"\0"), 0)


def read(path: Path) -> str:
    """The last line noted; "" if there was none."""
    if not path.exists():
        return ""
    return path.read_bytes()[:NBYTES].rstrip(b"\0").decode("utf-8", "replace")


def parse(line: str) -> tuple[str, int, str]:
    """(phase, step, last collective) of a line; the step is -1 and the collective "" where it names none."""
    found = _LINE.fullmatch(line)
    if found is None:
        return line, -1, ""
    return found["phase"], int(found["step"]), found["call"] or ""
