"""Finding: one check's word on one case. Verdict: all of them, and the exit code that follows.

A finding can be argued with by someone who never saw the code: requirement, expected, actual, with ranks and units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from zerobench.codec import encode

SHIMMED = "shimmed: "
"""How the line of a finding's detail begins that says what was not the real thing."""
NOT_RUN = "not run: "
"""How `Finding.actual` begins where a run that it needs was never done."""


class Status(Enum):
    PASS = "pass"
    FAIL = "fail"
    XFAIL = "xfail"  # failed, as the suite says it would
    XPASS = "xpass"  # passed, though the suite says it fails: the excuse is stale
    SKIP = "skip"
    ERROR = "error"  # zerobench's own fault, or the machine's
    MISSING = "missing"  # no baseline
    INVALID = "invalid"  # an instrument disagrees with its witness: nothing can be said
    INCONCLUSIVE = "inconclusive"


class Level(Enum):
    MUST = "MUST"
    SHOULD = "SHOULD"
    INFO = "INFO"


@dataclass(frozen=True, slots=True)
class Finding:
    """claim: does it do what it claims? paper: what the paper's stage does? status: the one that counts here.

    relation: "==", "<=", "within" (noise), or "" where nothing is compared. ranks: those it is about; empty for all.
    detail: more lines for a person: where to look.
    """

    suite: str
    case: str
    check: str
    status: Status
    requirement: str
    claim: Status | None = None
    paper: Status | None = None
    expected: str = ""
    actual: str = ""
    relation: str = ""
    ranks: tuple[int, ...] = ()
    level: Level = Level.MUST
    detail: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()  # the numbers behind `actual`

    @property
    def id(self) -> str:
        return f"{self.suite}::{self.case}::{self.check}"

    def to_json(self) -> dict[str, Any]:
        body = encode(replace(self, metrics=()))
        return {"id": self.id, **body, "metrics": {k: encode(v) for k, v in self.metrics}}


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...]
    strict: bool = False

    def counts(self) -> Counter[str]:
        return Counter(f.status.value for f in self.findings)

    def without_missing(self) -> Verdict:
        """The findings whose runs were done: what is left to show of a run that was stopped."""
        return replace(self, findings=tuple(f for f in self.findings if not f.actual.startswith(NOT_RUN)))

    def exit_code(self, *, interrupted: int = 0) -> int:
        """130, 2, 3, 1, 6, 4, 5, 0: the first that holds (2, usage, is decided before anything ran).

        interrupted: the exit code of the signal that stopped the run: 130 for SIGINT, 128 and its number for another.

        Where every finding is a skip nothing was judged: that is 5, and no clean bill.
        """
        if interrupted:
            return interrupted
        held = {f.status for f in self.findings if f.level is Level.MUST or (f.level is Level.SHOULD and self.strict)}
        if any(f.status is Status.ERROR for f in self.findings):
            return 3
        if held & {Status.FAIL, Status.XPASS}:
            return 1
        if held & {Status.INVALID, Status.INCONCLUSIVE}:
            return 6
        if Status.MISSING in held:
            return 4
        return 5 if all(f.status is Status.SKIP for f in self.findings) else 0


def worst(statuses: Iterable[Status]) -> Status:
    """The status that speaks for several: a failure before a doubt, a doubt before a pass, a skip only if all are."""
    order = (Status.ERROR, Status.FAIL, Status.INVALID, Status.INCONCLUSIVE, Status.MISSING, Status.PASS, Status.SKIP)
    present = set(statuses)
    return next((s for s in order if s in present), Status.SKIP)
