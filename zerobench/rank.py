"""What a launcher hands to the worker on each rank (`RankContext`), and what the worker hands back (`Outcome`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zerobench.claims import Claims
from zerobench.codec import decode, encode
from zerobench.readings import CPU, Place
from zerobench.record import Call, ModelFacts, Sample

if TYPE_CHECKING:
    from zerobench.models import Model

UNABLE = "unable"
"""The status of a rank that could not even begin: the machine's fault, and no word about a subject."""


JOINING = "joining the other ranks"
"""The phase in which only the machinery and the network are at work."""


class CannotJoin(RuntimeError):
    """The ranks could not meet: the network's fault, or that of a rank which did not come."""


def _unheard(call: Call) -> None:
    pass


class Simulation(Protocol):
    """A world of which this rank is the only one, and whose tensors have no memory (`zerobench.simulation`)."""

    def data(self, model: Model) -> Model: ...


@dataclass(frozen=True)
class RankContext:
    """One rank, before it has joined the others.

    join: collective; initialises the default process group; a name as its argument makes one apart, for processes that
    a rank starts beside itself; raises CannotJoin. note: tells the launcher what this rank is doing, in one line that
    survives a kill. entered: tells it of a collective, before it is issued.
    scratch: an existing empty folder that all ranks share. control_ports: TCP ports of the rendezvous, whose traffic is
    not the subject's. place: what backend and device are part of. simulation: None on real ranks.
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
    simulation: Simulation | None = None
    entered: Callable[[Call], None] = _unheard


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
