"""zerobench: a benchmark and conformance suite for ZeRO, the data-parallel training that shards model states.

The plug-in API is what this module exports. Importing it imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Category": "zerobench.terms",
    "Claims": "zerobench.claims",
    "Collective": "zerobench.terms",
    "Engine": "zerobench.implementations.protocol",
    "Implementation": "zerobench.implementations.protocol",
    "Job": "zerobench.implementations.protocol",
    "Moment": "zerobench.terms",
    "OptimizerSpec": "zerobench.claims",
    "ParamGroup": "zerobench.claims",
    "Recipe": "zerobench.claims",
    "Stage": "zerobench.terms",
    "StepReport": "zerobench.implementations.protocol",
    "Unsupported": "zerobench.implementations.protocol",
    "World": "zerobench.implementations.protocol",
    "torch_states": "zerobench.implementations.helpers",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from zerobench.claims import Claims as Claims
    from zerobench.claims import OptimizerSpec as OptimizerSpec
    from zerobench.claims import ParamGroup as ParamGroup
    from zerobench.claims import Recipe as Recipe
    from zerobench.implementations.helpers import torch_states as torch_states
    from zerobench.implementations.protocol import Engine as Engine
    from zerobench.implementations.protocol import Implementation as Implementation
    from zerobench.implementations.protocol import Job as Job
    from zerobench.implementations.protocol import StepReport as StepReport
    from zerobench.implementations.protocol import Unsupported as Unsupported
    from zerobench.implementations.protocol import World as World
    from zerobench.terms import Category as Category
    from zerobench.terms import Collective as Collective
    from zerobench.terms import Moment as Moment
    from zerobench.terms import Stage as Stage


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'zerobench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
