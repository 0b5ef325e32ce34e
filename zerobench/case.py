"""Case: one cell of a suite's matrix. Run: one launch of ranks, of which a case may need several.

A case is what a user names and a verdict is about. Its checks name scenarios; each (case, scenario) is a run, and a run
that several cases share (every model's gradients are judged on the same dyadic model) is done once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zerobench.codec import decode, encode
from zerobench.scenarios import SCENARIOS


@dataclass(frozen=True)
class Case:
    """implementation: the name that stands in ids; reference: how a rank finds it (an entry point, module:Class, path.py:Class)."""

    implementation: str
    reference: str
    model: str
    world_size: int
    precision: str = "fp32"
    micro_batches: int = 1
    warmup: int = 1
    measured: int = 3
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return _id(self, f"n{self.world_size}")

    @property
    def family(self) -> str:
        """The id of what a check over several world sizes is about: this case at every n."""
        return _id(self, "n*")

    def run(self, scenario: str) -> Run:
        """The run that `scenario` makes of this case. Raises KeyError for an unknown scenario."""
        wanted = SCENARIOS[scenario]
        return Run(
            scenario=scenario,
            case=replace(
                self,
                model=wanted.model or self.model,
                micro_batches=wanted.micro_batches or self.micro_batches,
                measured=wanted.measured or self.measured,
                warmup=self.warmup if wanted.warmup is None else wanted.warmup,
            ),
        )

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

    @property
    def id(self) -> str:
        return f"{self.case.id}@{self.scenario}"

    def to_json(self) -> dict[str, Any]:
        return encode(self)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Run:
        return decode(cls, data)


def _id(case: Case, world: str) -> str:
    axes = {"A": case.micro_batches if case.micro_batches != 1 else None}
    tail = "".join(f"/{name}={value}" for name, value in sorted(axes.items()) if value is not None)
    tail += "".join(f"/{name}={value}" for name, value in sorted(case.options.items()))
    return f"{case.implementation}/{case.model}/{world}/{case.precision}{tail}"
