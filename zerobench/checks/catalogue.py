"""The specification as a table: every check by id, in the order of its chapters."""

from __future__ import annotations

from zerobench.checks import memory, numerics, runtime, timing, traffic
from zerobench.checks.check import Check

CHECKS: dict[str, Check] = {
    check.id: check for module in (memory, traffic, numerics, timing, runtime) for check in module.CHECKS
}
ALWAYS = "runtime.completes"
"""Judged whatever a suite asks for: a run that did not end is a failure, not a gap."""
