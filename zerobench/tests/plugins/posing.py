"""Stage 2, honestly said to be given a stand-in; one that raises; and one that is not there."""

from __future__ import annotations

from typing import Any

from zerobench.implementations.protocol import Job
from zerobench.implementations.reference import Zero2


class Posing(Zero2):
    name = "posing"
    shimmed = "a clock that stands still"
    imports = ("msgspec.json",)


class Falling(Posing):
    name = "falling"

    def build(self, job: Job) -> Any:
        raise RuntimeError("no GPU")


class Absent(Posing):
    name = "absent"

    def unavailable(self) -> str:
        return "not installed"
