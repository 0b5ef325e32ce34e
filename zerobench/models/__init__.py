"""Models to train: deterministic weights and data, no files, no downloads.

`names` needs no torch; `build` does.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from zerobench.models.sizes import SIZES

if TYPE_CHECKING:
    from zerobench.models.model import Model as Model


def names() -> list[str]:
    """The models that `build` knows."""
    return list(SIZES)


def build(name: str, *, world_size: int, micro_batches: int, device: str = "cpu") -> Model:
    """The model `name` for n = world_size and A = micro_batches, fp32 on `device`.

    The same name gives the same weights, and the same example for the same global index, in every process and at every
    n and A. The global random state is neither read nor changed. Raises ValueError for an unknown name.
    """
    if name not in SIZES:
        near = difflib.get_close_matches(name, SIZES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(SIZES)}"
        raise ValueError(f"unknown model {name!r}; {hint}")
    from zerobench.models import dyadic, edges, gpt, mlp, stack  # here, so that listing the names imports no torch

    family, sizes = SIZES[name]
    make = {"mlp": mlp.build, "stack": stack.build, "gpt": gpt.build, "dyadic": dyadic.build, "edges": edges.build}[
        family
    ]
    return make(sizes, world_size=world_size, micro_batches=micro_batches, device=device)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from zerobench.models.model import Model

        return Model
    raise AttributeError(f"module 'zerobench.models' has no attribute {name!r}")
