"""DTensor's planning, kept apart from the world that is simulated.

To learn shapes, DTensor runs an operator once on fake tensors of the whole size. On real ranks these are nobody's
memory, and the ledger knows them by their type. In a simulation they would look like the subject's own; so they are
made where none of our modes is active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

_NAME = "_propagate_tensor_meta_non_cached"


@contextmanager
def apart() -> Iterator[None]:
    """Within it DTensor plans by itself. Raises AttributeError where this torch plans elsewhere."""
    own = getattr(ShardingPropagator, _NAME)

    def plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return own(self, *args, **kwargs)

    setattr(ShardingPropagator, _NAME, plan)
    try:
        yield
    finally:
        setattr(ShardingPropagator, _NAME, own)
