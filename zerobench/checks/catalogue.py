"""The specification as a table: every check by id, in the order of its chapters."""

from __future__ import annotations

from zerobench.checks import devices, features, memory, messages, numerics, peaks, runtime, state, timing, traffic, work
from zerobench.checks.check import Check

CHAPTERS = (memory, peaks, devices, traffic, messages, numerics, features, work, state, timing, runtime)
CHECKS: dict[str, Check] = {check.id: check for chapter in CHAPTERS for check in chapter.CHECKS}
ALWAYS = "runtime.completes"
"""Judged whatever a suite asks for: a run that did not end is a failure, not a gap."""
