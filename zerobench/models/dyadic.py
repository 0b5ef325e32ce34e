"""The dyadic model: training whose arithmetic is exact in fp32, bf16 and fp16, in any order, for n <= 8 and A <= 4.

Two linear units with one-hot inputs, so that a weight meets one example at a time, and powers of two elsewhere:

    state = [W1 x, u . shift1]                unit 1: W1 is (2, 53), shift1 (5,)
    out   = [W2 state, state + u . shift2]    unit 2: W2 is (49, 2), shift2 (5,)
    loss  = n A (2 c . out + 2 v . level)     level (1,) is in no unit

Per example: x is one-hot; c one-hot with a sign; u one-hot with a sign, or zero; v a sign, or zero.

Why it is exact, in 8 bits of significand (bf16's):

1. The loss's outermost factor is n A, so every gradient is n A times a dyadic number: it can be divided by n and by A
   before or after reduction, and the mean over n A micro-batches is the plain sum over the step's examples.
2. A step has at most 48 examples, and W1's rows repeat after 53, W2's after 49: in a step a row gets a gradient from at
   most one example. W1's is 2 W2[k], W2's is 2 W1[i]: each depends on the other's weights. (The two periods differ, so
   partners change from step to step.)
3. All weights of W1 and W2 start at +-2. One step of scenarios.SGD (lr 1/4, momentum 1/2) moves one by half its
   partner: by 1 at the first step, then by at most 2 in steps of 1/2. Weights met in the first three steps are at most
   5, in units of 1/2: 10 units. Times n A, whose odd part is at most 21 (n = 7, A = 3), it is 210: 8 bits. Products of
   two such weights are at most 100 units, sums of two of them 200: the outputs are exact too, and the loss, summed in
   fp32, is.
4. The shifts and the level collect signs, at most 7 a step (6 where n A = 21; twice that where they are tied): any
   partial sum times n A stays within 8 bits. They are where the contributions of several ranks meet in one element.

Different n A that divide 48 see the same examples in a step. Over three steps each element gets a gradient.

With `buffers` each unit has two: `order`, whole numbers, says which shift an example meets and may not be rounded;
`seen`, one float, counts the unit's forward passes in training mode, and stays exact in bf16 up to 256 of them. No loss
depends on `seen`: how often a module is run is the caller's business, and the oracle runs it n A times a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zerobench.models.model import Boundary, Model, generator

INPUTS, HIDDEN, OUTPUTS, SHIFTS = 53, 2, 49, 5
STEP_EXAMPLES = 48  # at most; below both periods, and a multiple of most n A


class Buffered(nn.Module):
    """u in another order, (examples, 5) -> (examples, 5), and a count of the passes in training mode."""

    order: Tensor
    seen: Tensor

    def __init__(self, random: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(SHIFTS, generator=random))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, u: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return u[:, self.order]


class First(nn.Module):
    """(examples, 53), (examples, 5) -> (examples, 3): W1 x, and the shift's part beside it."""

    def __init__(self, random: torch.Generator, buffers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(2.0 * signs((HIDDEN, INPUTS), random))
        self.shift = nn.Parameter(signs((SHIFTS,), random))
        self.buffered = Buffered(random) if buffers else nn.Identity()

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        x, u = x.to(self.weight.dtype), self.buffered(u).to(self.weight.dtype)
        return torch.cat([x @ self.weight.t(), u @ self.shift[:, None]], dim=1)


class Second(nn.Module):
    """(examples, 3), (examples, 5) -> (examples, 50)."""

    def __init__(self, random: torch.Generator, unused: bool, buffers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(2.0 * signs((OUTPUTS, HIDDEN), random))
        self.shift = nn.Parameter(signs((SHIFTS,), random))
        if unused:
            self.spare = nn.Parameter(signs((2,), random))
        self.buffered = Buffered(random) if buffers else nn.Identity()

    def forward(self, state: Tensor, u: Tensor) -> Tensor:
        state, u = state.to(self.weight.dtype), self.buffered(u).to(self.weight.dtype)
        return torch.cat([state[:, :HIDDEN] @ self.weight.t(), state[:, HIDDEN:] + u @ self.shift[:, None]], dim=1)


class Dyadic(nn.Module):
    """forward(x, u, c, v): n A times the sum over the micro-batch's examples, a scalar."""

    def __init__(
        self, boundary: Boundary, factor: int, *, tied: int = 0, frozen: int = 0, unused: int = 0, buffers: int = 0
    ) -> None:
        super().__init__()
        random = generator(4)
        self.boundary, self.factor = boundary, factor
        self.first = First(random, bool(buffers))
        self.second = Second(random, bool(unused), bool(buffers))
        self.level = nn.Parameter(signs((1,), random))
        if tied:
            self.second.shift = self.first.shift
        if frozen:
            self.second.weight.requires_grad_(False)  # the gradient still passes through it to the first unit

    def forward(self, x: Tensor, u: Tensor, c: Tensor, v: Tensor) -> Tensor:
        state = self.boundary(self.first(x, u), "block 0")
        out = self.boundary(self.second(state, u), "block 1")
        level = v.to(self.level.dtype) * self.level
        return self.factor * (2.0 * (out.float() * c).sum() + 2.0 * level.float().sum())


def build(sizes: Mapping[str, int], *, world_size: int, micro_batches: int, device: str) -> Model:
    boundary = Boundary()
    factor = world_size * micro_batches
    module = Dyadic(boundary, factor, **sizes).to(device)
    examples = max(STEP_EXAMPLES // factor, 1)
    units = (module.first, module.second)
    return Model(module, units, boundary, examples, examples, world_size, micro_batches, example, device)


def example(index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (53,), u (5,), c (50,), v (1,): see the module's docstring. The last element of c is 1, the shifts' way out."""
    sign = signs((2,), generator(5, index))
    x, u, c, v = torch.zeros(INPUTS), torch.zeros(SHIFTS), torch.zeros(OUTPUTS + 1), torch.zeros(1)
    x[index % INPUTS] = 1.0
    c[index % OUTPUTS] = sign[0]
    c[OUTPUTS] = 1.0
    place = index % (SHIFTS + 2)
    if place < SHIFTS:
        u[place] = sign[1]
    elif place == SHIFTS:
        v[0] = sign[1]
    return x, u, c, v


def signs(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """+1 or -1 at random."""
    return torch.randint(2, shape, generator=random).float() * 2 - 1
