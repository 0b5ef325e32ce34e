"""Equal residual blocks and nothing else: every element is in a unit, every unit has the same number of elements.

For checks in which only the depth may change.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zerobench.models.model import Boundary, Model, generator, materialize


class Block(nn.Module):
    """x + relu(W x + b) / depth: (examples, width) -> (examples, width). The division keeps deep stacks finite."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        return x + F.relu(self.linear(x)) / self.depth


class Stack(nn.Module):
    """`depth` blocks. forward(x, target): mean squared error."""

    def __init__(self, boundary: Boundary, *, width: int, depth: int) -> None:
        super().__init__()
        self.boundary = boundary
        self.blocks = nn.ModuleList(Block(width, depth) for _ in range(depth))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = self.boundary(block(x), f"block {i}")
        return F.mse_loss(x.float(), target)


def build(sizes: Mapping[str, int], *, world_size: int, micro_batches: int, device: str) -> Model:
    boundary = Boundary()
    width, depth, examples = sizes["width"], sizes["depth"], sizes["examples"]
    with torch.device("meta"):
        module = Stack(boundary, width=width, depth=depth)
    materialize(module, sizes, device)

    def example(index: int) -> tuple[Tensor, Tensor]:
        """x ~ N(0, 1) and its reversal, `width` elements each."""
        x = torch.randn(width, generator=generator(2, index))
        return x, x.flip(0)

    units = tuple(module.blocks)
    return Model(module, units, boundary, examples, examples, world_size, micro_batches, example, device)
