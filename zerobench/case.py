"""Case: one cell of a suite's matrix. Run: one launch of ranks, of which a case may need several.

A case is what a user names and a verdict is about. Its checks name scenarios; each (case, scenario) is a run, and a run
that several cases share (every model's gradients are judged on the same dyadic model) is done once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zerobench.codec import decode, encode
from zerobench.scenarios import SCENARIOS


@dataclass(frozen=True)
class Case:
    """implementation: the name that stands in ids; reference: how a rank finds it (an entry point, module:Class,
    path.py:Class). launch: "local" or "torchrun", or "simulate": then the id says so, and no measured case has the same."""

    implementation: str
    reference: str
    model: str
    world_size: int
    precision: str = "fp32"
    micro_batches: int = 1
    warmup: int = 1
    measured: int = 3
    device: str = "cpu"
    launch: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        return _id(self, f"n{self.world_size}")

    @property
    def simulated(self) -> bool:
        return self.launch == "simulate"

    @property
    def family(self) -> str:
        """The id of what a check over several world sizes is about: this case at every n."""
        return _id(self, "n*")

    def run(self, scenario: str) -> Run:
        """The run that `scenario` makes of this case. Raises KeyError for an unknown scenario.

        A run that loads names the world size that saved, since two cases may reach the same n from different ones.
        """
        wanted = SCENARIOS[scenario]
        changed = {
            "model": (wanted.gpu_model if self.device != "cpu" else None) or wanted.model or self.model,
            "micro_batches": wanted.micro_batches or self.micro_batches,
            "measured": wanted.measured or self.measured,
            "warmup": self.warmup if wanted.warmup is None else wanted.warmup,
            "world_size": max(1, int(self.world_size * wanted.world)),
        }
        same = all(getattr(self, name) == value for name, value in changed.items())
        case = self if same else replace(self, **changed)  # type: ignore[arg-type]
        return Run(scenario=scenario, saved_at=self.world_size if wanted.loads else None, case=case)

    def to_json(self) -> dict[str, Any]:
        return encode(self)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Case:
        return decode(cls, data)


@dataclass(frozen=True)
class Run:
    """One launch: `case` as the scenario has changed it."""

    scenario: str
    case: Case
    saved_at: int | None = None  # ranks that saved what this run loads

    @cached_property
    def id(self) -> str:
        return f"{self.case.id}@{self.scenario}" + (f"-from-n{self.saved_at}" if self.saved_at else "")

    @property
    def checkpoint(self) -> str | None:
        """A name for the folder that this run saves to or loads from; None for a run that does neither."""
        scenario = SCENARIOS[self.scenario]
        if scenario.checkpoint is None:
            return None
        case = replace(self.case, world_size=self.saved_at or self.case.world_size, measured=0)
        return f"{case.id}@{scenario.loads or self.scenario}"

    def to_json(self) -> dict[str, Any]:
        return encode(self)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Run:
        return decode(cls, data)


def _id(case: Case, world: str) -> str:
    if case.micro_batches == 1 and not case.options and not case.simulated:  # nearly all of them, and asked for often
        return f"{case.implementation}/{case.model}/{world}/{case.precision}"
    axes = {"A": case.micro_batches if case.micro_batches != 1 else None}
    tail = "".join(f"/{name}={value}" for name, value in sorted(axes.items()) if value is not None)
    tail += "".join(f"/{name}={value}" for name, value in sorted(case.options.items()))
    tail += "/simulated" if case.simulated else ""
    return f"{case.implementation}/{case.model}/{world}/{case.precision}{tail}"
