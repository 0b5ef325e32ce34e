"""Which installed libraries stand behind an implementation, and in which versions."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

IN_PROVENANCE = frozenset({"zerobench", "torch"})
"""What every result names once, for all that ran in it."""


def libraries(modules: Iterable[str]) -> tuple[str, ...]:
    """ "megatron-core 0.16.1" for "megatron.core.optimizer": the distributions that are named as a module, or as a package
    around it, is, the longest such name of each; dots, dashes and underscores are alike (packaging's normalised names).
    """
    found = (_distribution(module) for module in modules if module.partition(".")[0] not in IN_PROVENANCE)
    return tuple(dict.fromkeys(said for said in found if said))


def _distribution(module: str) -> str | None:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = "-".join(parts[:end]).replace("_", "-").lower()
        try:
            return f"{name} {version(name)}"
        except (PackageNotFoundError, ValueError):
            continue
    return None
