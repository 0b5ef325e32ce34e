"""Models of awkward sizes whose training is exact in fp32, bf16 and fp16: vectors w, of the lengths that a row says.

    loss = n A * sum over examples and elements j of x_j |w_j|

x_j is 0, 1 or -1, so that the gradient of w_j is n A x_j sign(w_j): it sees the weights, and one that is stale, or at
another's place, tells. An element gets a gradient from every 7th example, so from several micro-batches a step.

Why it is exact, in 8 bits of significand (see dyadic.py for the factor n A): of at most 48 examples a step at most 7
reach an element; any partial sum of them times n A (odd part at most 21) is at most 147. Weights start at +-1; a mean
gradient is at most 7, so that three steps of scenarios.SGD (lr 1/4, momentum 1/2) move a weight by at most
7 (1 + 3/2 + 7/4) / 4 < 8, in units of 1/16: below 9 * 16 = 144 units. Losses are sums of such numbers in fp32.
Of five hits in a row one has the other sign: a whole step's never cancel, and each element moves unless it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zerobench.models.dyadic import STEP_EXAMPLES, signs
from zerobench.models.model import Boundary, Model, generator

PERIOD = 7
"""An element's gradient comes from every PERIOD-th example."""


class Vectors(nn.Module):
    """Vectors by name. (examples, their elements), (examples, k) -> (examples, both): x_j |w_j| beside what came in."""

    def __init__(self, sizes: Mapping[str, int], random: torch.Generator) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        for name, numel in sizes.items():
            self.register_parameter(name, nn.Parameter(signs((numel,), random)))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        # By name: some implementations put plain tensors in the parameters' place for the forward.
        weights = [getattr(self, name) for name in self.sizes]
        parts = torch.split(x, list(self.sizes.values()), dim=1)
        own = [part.to(w.dtype) * w.abs() for part, w in zip(parts, weights, strict=True)]
        return torch.cat([before.to(own[0].dtype), *own], dim=1)


class Edges(nn.Module):
    """forward(x), of shape (examples, Psi): n A times the micro-batch's sum, a scalar. The last vectors are no unit."""

    def __init__(self, boundary: Boundary, factor: int, groups: Sequence[Mapping[str, int]]) -> None:
        super().__init__()
        random = generator(6, *(numel for sizes in groups for numel in sizes.values()))
        self.boundary, self.factor = boundary, factor
        self.blocks = nn.ModuleList(Vectors(sizes, random) for sizes in groups[:-1])
        self.rest = Vectors(groups[-1], random)
        self.widths = [sum(sizes.values()) for sizes in groups]

    def forward(self, x: Tensor) -> Tensor:
        *parts, last = torch.split(x, self.widths, dim=1)
        out = x.new_empty(len(x), 0)
        for i, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            out = self.boundary(block(part, out), f"block {i}")
        return self.factor * self.rest(last, out).float().sum()  # type: ignore[no-any-return]


def build(sizes: Mapping[str, int], *, world_size: int, micro_batches: int, device: str) -> Model:
    """sizes: elements of each vector, by "unit.name"; those of the last unit are in none."""
    boundary = Boundary()
    groups: dict[str, dict[str, int]] = {}
    for path, numel in sizes.items():
        unit, name = path.split(".")
        groups.setdefault(unit, {})[name] = numel
    factor = world_size * micro_batches
    module = Edges(boundary, factor, list(groups.values())).to(device)
    examples = max(STEP_EXAMPLES // factor, 1)
    psi = sum(sizes.values())

    def example(index: int) -> tuple[Tensor]:
        """x (Psi,): 0 but at every PERIOD-th element, where it is 1; of five examples that meet there one has -1."""
        place = torch.arange(psi)
        sign = torch.where((index // PERIOD + place) % 5 == 0, -1.0, 1.0)
        return (sign * ((index + place) % PERIOD == 0),)

    units = tuple(module.blocks)
    return Model(module, units, boundary, examples, examples, world_size, micro_batches, example, device)
