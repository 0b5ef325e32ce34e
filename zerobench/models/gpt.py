"""A plain decoder: pre-norm, learned positions, an untied head. Each block is a unit; embeddings and head are in none.

No dropout, and no bias on the keys: a constant added to every key shifts all scores of a query alike, the softmax does
not see it, its true gradient is zero, and rounding noise would be judged.

`checkpointed` forgets the activations inside each block and computes them again in backward; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerobench.models.model import Boundary, Model, generator, materialize


class Attention(nn.Module):
    """Causal self-attention: (examples, context, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (examples, heads, context, width / heads)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each after a norm and beside the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.narrow.weight.dtype)
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """forward(tokens), of shape (examples, context + 1): mean cross-entropy of each next token."""

    def __init__(
        self,
        boundary: Boundary,
        *,
        vocabulary: int,
        width: int,
        heads: int,
        depth: int,
        context: int,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.boundary, self.checkpointed = boundary, checkpointed
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            out = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            x = self.boundary(out, f"block {i}")
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(sizes: Mapping[str, int], *, world_size: int, micro_batches: int, device: str) -> Model:
    boundary = Boundary()
    kept = dict(sizes)
    examples, checkpointed = kept.pop("examples"), bool(kept.pop("checkpointed", 0))
    with torch.device("meta"):
        module = Gpt(boundary, **kept, checkpointed=checkpointed)
    materialize(module, kept | {"examples": examples}, device)
    vocabulary, context = kept["vocabulary"], kept["context"]

    def example(index: int) -> tuple[Tensor]:
        """context + 1 tokens: a random start and a random stride round the vocabulary, which can be learned."""
        start, stride = torch.randint(vocabulary, (2,), generator=generator(3, index)).tolist()
        return ((start + stride * torch.arange(context + 1)) % vocabulary,)

    units, tokens = tuple(module.blocks), examples * context
    return Model(module, units, boundary, examples, tokens, world_size, micro_batches, example, device)
