"""A multi-layer perceptron for regression: each hidden layer is a unit, the last layer is in none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zerobench.models.model import Boundary, Model, generator, materialize


class Hidden(nn.Module):
    """relu(W x + b): (examples, inputs) -> (examples, width)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x.to(self.linear.weight.dtype)))


class Mlp(nn.Module):
    """`depth` hidden layers and a linear one. forward(x, target): mean squared error."""

    def __init__(self, boundary: Boundary, *, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.boundary = boundary
        self.blocks = nn.ModuleList(Hidden(inputs if i == 0 else width, width) for i in range(depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = self.boundary(block(x), f"block {i}")
        return F.mse_loss(self.head(x).float(), target)


def build(sizes: Mapping[str, int], *, world_size: int, micro_batches: int, device: str) -> Model:
    boundary = Boundary()
    kept = dict(sizes)
    examples = kept.pop("examples")
    with torch.device("meta"):
        module = Mlp(boundary, **kept)
    materialize(module, sizes, device)
    inputs, outputs = kept["inputs"], kept["outputs"]

    def example(index: int) -> tuple[Tensor, Tensor]:
        """x ~ N(0, 1) of `inputs` elements, and a smooth function of it of `outputs`."""
        x = torch.randn(inputs, generator=generator(1, index))
        return x, torch.sin(2 * x[:outputs])

    units = tuple(module.blocks)
    return Model(module, units, boundary, examples, examples, world_size, micro_batches, example, device)
