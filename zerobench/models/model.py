"""Model: a module, its units, and its data. Boundary: where a backward pass can be watched between two units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Callback = Callable[[str], None]
Example = Callable[[int], tuple[Tensor, ...]]


class Boundary:
    """The identity, with a callback in its backward. One object serves all boundaries of a model.

    It stands in the modules' own forward, and not in a hook, so that it is still there when an implementation casts,
    flattens, wraps or copies the module; a copied module keeps this very object. The callback is looked up as the
    gradient passes, so it may be set after the forward.
    """

    callback: Callback | None = None
    forward_callback: Callback | None = None

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """`x`; as it passes, forward_callback(name); as its gradient comes back, callback(name)."""
        if self.forward_callback is not None:
            self.forward_callback(name)
        return _Identity.apply(x, self, name)  # type: ignore[no-any-return, no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        return self


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary, name: str) -> Tensor:
        ctx.boundary, ctx.name = boundary, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.boundary.callback is not None:
            ctx.boundary.callback(ctx.name)
        return gradients[0], None, None


@dataclass(frozen=True)
class Model:
    """What is trained.

    module: fp32; `module(*batch)` is the fp32 scalar mean loss of the micro-batch; it casts its own float inputs to its
    weights' dtype. units: submodules that are sharded as one, in order of use. examples, tokens: of one rank and
    micro-batch. example: the one at a global index, fp32 or int64 on the CPU.
    """

    module: nn.Module
    units: tuple[nn.Module, ...]
    boundary: Boundary
    examples: int
    tokens: int
    world_size: int
    micro_batches: int
    example: Example
    device: str = "cpu"

    def batch(self, step: int, rank: int, micro: int) -> tuple[Tensor, ...]:
        """The examples of one micro-batch, stacked: each tensor is (examples, ...), on the device.

        An example is made from its global index alone, ((step*A + micro)*n + rank)*examples + i: a step is a run of
        consecutive indices, whatever n and A split it.
        """
        first = ((step * self.micro_batches + micro) * self.world_size + rank) * self.examples
        rows = [self.example(index) for index in range(first, first + self.examples)]
        return tuple(torch.stack(column).to(self.device) for column in zip(*rows, strict=True))

    def observe(self, callback: Callback | None) -> None:
        """Call `callback` with the name of a unit ("block 3") when the gradient of its output is about to enter it.

        The units above have then done their backward. None stops it.
        """
        self.boundary.callback = callback

    def observe_forward(self, callback: Callback | None) -> None:
        """Call `callback` with the name of a unit when its output exists and the next unit is about to run."""
        self.boundary.forward_callback = callback


def generator(*key: int) -> torch.Generator:
    """A generator of its own for `key`, apart from the global one."""
    seed = 0x5EED
    for word in key:
        seed = (seed * 1_000_003 + word + 1) % (1 << 63)
    return torch.Generator().manual_seed(seed)


def materialize(module: nn.Module, sizes: Mapping[str, int], device: str) -> None:
    """Give a module built on the meta device its weights: matrices scaled by their inputs, norms at one, biases small.

    The seed is the sizes themselves, in order. Biases are not zero, so that one that was lost is missed.
    """
    module.to_empty(device="cpu")
    random = generator(*sizes.values())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=random)
            elif name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=random)
    module.to(device)
