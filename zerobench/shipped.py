"""The suites that come with zerobench, and how a suite is found."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from zerobench.loader import did_you_mean

_HOMES = (Path(__file__).parent.parent / "suites", Path(__file__).parent / "_data" / "suites")
"""Where shipped suites are: beside the package in a checkout, inside it in a wheel."""


def names() -> tuple[str, ...]:
    """The suites that are shipped, by name."""
    return tuple(sorted({file.stem for home in _HOMES for file in home.glob("*.yaml")}))


def find(name_or_path: str) -> Path:
    """The file of a suite: a shipped one by its bare name, any by its path. Raises LookupError, with what there is."""
    if re.fullmatch(r"[a-z0-9-]+", name_or_path):
        for home in _HOMES:
            if (file := home / f"{name_or_path}.yaml").is_file():
                return file
    path = Path(name_or_path)
    with contextlib.suppress(OSError, ValueError):  # a name too long, or with a zero byte: no file has it
        if path.is_file():
            return path
        if os.path.lexists(path):
            raise LookupError(
                f"{path}: not a file, but a folder, a pipe, a device or a link to nowhere; name a suite's file"
            )
    hint = did_you_mean(name_or_path, names())
    raise LookupError(f"no suite {name_or_path[:200]!r}{hint}; shipped: {', '.join(names()) or 'none'}")
