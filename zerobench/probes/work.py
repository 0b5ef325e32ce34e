"""How many elements an optimizer updates: what stage 1 and above divide among the ranks.

Counted at the dispatcher, beneath every optimizer class: the last in-place operation of each update rule, single
tensor, foreach or fused. What an optimizer does in its own kernels is not seen; then nothing is counted, and nothing
is judged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_RULES = ("addcdiv_", "_foreach_addcdiv_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")


class UpdatedElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager around a step. numel: elements of the tensors that update rules wrote, DTensors' local parts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0
        self._simulated = detect_fake_mode()  # the mode of a simulated world, where every tensor is fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not Tensor and t is not torch.nn.Parameter and hasattr(t, "to_local") for t in types):
            return NotImplemented  # a DTensor takes itself apart, and its local part comes by again
        name = func.__name__.split(".")[0]
        if name in _RULES:
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.numel += sum(t.numel() for t in written if t.numel() > 1 and not self._imagined(t))
        return func(*args, **(kwargs or {}))

    def _imagined(self, tensor: Tensor) -> bool:
        """Whether it is only a shape: torch 2.11 tries a DTensor's rule on fake tensors of the whole size first."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._simulated
