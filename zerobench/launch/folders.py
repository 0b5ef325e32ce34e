"""Folders that a launcher makes, and that go with it, whatever a subject did to them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path


def name(checkpoint: str) -> str:
    """Of the folder for a checkpoint: short, and right for every file system."""
    return hashlib.sha256(checkpoint.encode()).hexdigest()[:32]


def remove(folder: str | Path) -> None:
    """Remove a tree as far as that is possible, also one with folders that a strange umask has closed."""
    shutil.rmtree(folder, ignore_errors=True)
    closed = [str(folder)] if os.path.isdir(folder) and not os.path.islink(folder) else []
    if not closed:
        return
    while closed:
        path = closed.pop()
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                closed += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(folder, ignore_errors=True)
