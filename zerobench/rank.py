"""What a launcher hands to the worker on each rank (`RankContext`), and what the worker hands back (`Outcome`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerobench.claims import Claims
from zerobench.codec import decode, encode
from zerobench.readings import CPU, Place
from zerobench.record import ModelFacts, Sample


@dataclass(frozen=True)
class RankContext:
    """One rank, before it has joined the others.

    join: collective; initialises the default process group; a name as its argument makes one apart, for processes that
    a rank starts beside itself. note: tells the launcher what this rank is doing, in one line that survives a kill.
    scratch: an existing empty folder that all ranks share. control_ports: TCP ports of the rendezvous, whose traffic is
    not the subject's. place: what backend and device are part of.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    join: Callable[..., None]
    note: Callable[[str], None]
    scratch: Path
    control_ports: frozenset[int] = frozenset()
    place: Place = CPU


@dataclass(frozen=True)
class Outcome:
    """What became of a run on one rank. status: "ok", "skip" (reason says why), "refused" (a bad plug-in: reason names
    what is wrong), "invalid" (an instrument failed its self-test), "error" (the subject raised: sample.failure)."""

    status: str
    sample: Sample
    reason: str = ""
    claims: Claims | None = None
    model: ModelFacts | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = encode(self)
        return body | {"claims": self.claims.to_json() if self.claims else None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        claims = data.get("claims")
        outcome = decode(cls, {k: v for k, v in data.items() if k != "claims"} | {"claims": None})
        return outcome if claims is None else replace(outcome, claims=Claims.from_json(claims))
