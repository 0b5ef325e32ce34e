"""Builds the NVML stand-in (nvml_stand_in.c) and lets the real nvidia-ml-py load it. It is called one everywhere."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
PID = 4242
"""Of the process whose part the tests play."""
GIB, MIB = 1 << 30, 1 << 20

_folder = tempfile.TemporaryDirectory(prefix="zerobench-nvml-")


@cache
def build(old: bool) -> Path:
    """The folder of a libnvidia-ml.so.1; old: without the second versions of the calls. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the NVML stand-in cannot be built")
    folder = Path(_folder.name, "old" if old else "new")
    folder.mkdir()
    flags = ["-DOLD"] if old else []
    output = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", *flags, "-o", str(output), str(SOURCE)], check=True)
    return folder


Play = Callable[..., Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """play(scene, old=False): nvidia-ml-py meets the stand-in, in this scene; returns the library, to move it on."""
    pynvml = pytest.importorskip("pynvml")

    def play(scene: str, *, old: bool = False, pid: int = PID) -> Any:
        library = ctypes.CDLL(str(build(old) / "libnvidia-ml.so.1"))
        monkeypatch.setattr(pynvml, "CDLL", lambda name: library)
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        library.zb_scene(scene.encode(), pid)
        return library

    yield play
