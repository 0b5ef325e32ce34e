"""What a mutant is, as data. No torch.

A mutant is a correct implementation with one real fault planted. Its base is the reference at some stage; everything
but the fault is the base's, so that what kills it is the fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """reference: where ranks find it. killers: checks of which each must kill it. stands_for: the public report.
    precision, world_size, micro_batches: where it shows. through: checks whose runs are done as well. loud: the fault
    itself is a crash or a hang; every other one is silent, and a kill by crash alone would prove nothing."""

    name: str
    fault: str
    stands_for: str
    killers: tuple[str, ...]
    reference: str
    precision: str = "bf16"
    world_size: int = 2
    micro_batches: int = 1
    through: tuple[str, ...] = ()
    loud: bool = False


def row(chapter: str, name: str, fault: str, stands_for: str, *killers: str, **more: Any) -> Mutant:
    """A mutant whose class has its name, in camel case, in a file of this package."""
    kind = "".join(word.capitalize() for word in name.split("-"))
    return Mutant(name, fault, stands_for, killers, f"zerobench.mutants.{chapter}:{kind}", **more)
