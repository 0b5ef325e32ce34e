"""The machine class: which step times may be compared with which. Bytes need none, they are the same everywhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from zerobench.record import Provenance

IGNORED = ("CUDA_VISIBLE_DEVICES", "ZEROBENCH_", "TORCH_LOGS", "NCCL_DEBUG")
"""Of the variables that a provenance keeps, those that say which device or how much to log: they change no speed."""


@dataclass(frozen=True)
class MachineClass:
    """device: its name; count: how many in one machine (of a CPU, the cores that a run may use). driver: its major version.

    nodes: how many machines. environment: the variables that change how fast a step is.
    """

    device: str
    count: int
    interconnect: str
    driver: str
    torch: str
    backend: str
    environment: Mapping[str, str]
    nodes: int = 1

    @classmethod
    def of(cls, about: Provenance) -> MachineClass:
        cpu = about.device == "cpu"
        return cls(
            device=f"cpu {about.cpu}".strip() if cpu else about.device,
            count=about.cores if cpu else about.device_count,
            interconnect=about.interconnect,
            driver=about.driver.split(".")[0],
            torch=about.torch,
            backend=about.backend,
            nodes=max(len(set(about.hosts)), 1),
            environment={k: v for k, v in about.environment.items() if not k.startswith(IGNORED)},
        )

    @property
    def gates(self) -> bool:
        """Whether step times of this class may fail a run: wall time on a CPU that others share never does."""
        return not self.device.startswith("cpu")

    @property
    def slug(self) -> str:
        """A folder's name: every part in words, the environment as six digits of its digest, if there is any."""
        parts = [
            self.device,
            f"x{self.count}",
            f"nodes{self.nodes}" if self.nodes > 1 else "",
            self.interconnect,
            f"driver{self.driver}" if self.driver else "",
            f"torch{self.torch}",
            self.backend,
        ]
        if self.environment:
            text = json.dumps(self.environment, sort_keys=True)
            parts.append(f"env{hashlib.sha256(text.encode()).hexdigest()[:6]}")
        return re.sub(r"[^a-z0-9.]+", "-", "-".join(p for p in parts if p).lower()).strip("-.")[:120]

    def differences(self, other: MachineClass) -> list[str]:
        """What sets `other` apart from this class, a phrase each: "torch 2.11.0, not 2.13.0"."""
        return [
            f"{field.name} {_text(getattr(other, field.name))}, not {_text(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in sorted(value.items())) or "(none)"
    return str(value) or "(none)"
