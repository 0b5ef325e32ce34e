"""The field's words, and the one comparison that ZeRO is made of.

ZeRO (Rajbhandari et al., arXiv 1910.02054, section 5) shards one more category of model state at each stage:
optimizer states at 1, gradients at 2, parameters at 3. `Stage.shards` is that sentence; nothing else in this package
decides by stage what is sharded.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from fractions import Fraction


class Category(Enum):
    """What a live byte is for. The first three are the model states; the others the paper calls residual states."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    OTHER = "other"


MODEL_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


class Stage(IntEnum):
    """How much of the model state is sharded: each stage shards one category more than the stage before it."""

    DDP = 0
    OPTIMIZER = 1
    GRADIENT = 2
    PARAMETER = 3

    def shards(self, category: Category) -> bool:
        """Whether a rank of this stage holds only its share of `category` (residual states are never sharded)."""
        return category in _SHARDED_FROM and self >= _SHARDED_FROM[category]


_SHARDED_FROM = {
    Category.OPTIMIZER: Stage.OPTIMIZER,
    Category.GRADIENT: Stage.GRADIENT,
    Category.PARAMETER: Stage.PARAMETER,
}


class Collective(Enum):
    """A kind of communication, by what it does; the name that a library gives its call does not matter."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"

    @property
    def ring_passes(self) -> int:
        """How often the whole tensor goes round a ring: an all-reduce is a reduce-scatter and an all-gather.

        Source: nccl-tests, doc/PERFORMANCE.md ("all-reduce 2(n-1)/n, the others (n-1)/n"); ZeRO paper section 7.
        A receive is the other end of a send, and a barrier has no payload: neither counts.
        """
        return _RING_PASSES[self]

    @property
    def rooted(self) -> bool:
        """Whether the cost differs by rank, so that only the sum over ranks, divided by n, can be compared."""
        return self in (
            Collective.REDUCE,
            Collective.BROADCAST,
            Collective.GATHER,
            Collective.SCATTER,
            Collective.SEND,
        )

    @property
    def reduces(self) -> bool:
        """Whether it sums what the ranks give: the kinds by which gradients are averaged."""
        return self in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)

    def wire_factor(self, n: int) -> Fraction:
        """Elements that a rank sends, over the elements of the full tensor, on a ring of `n` ranks (exact)."""
        return Fraction(self.ring_passes * (n - 1), n)


_RING_PASSES = {kind: 1 for kind in Collective} | {
    Collective.ALL_REDUCE: 2,
    Collective.RECV: 0,
    Collective.BARRIER: 0,
}


class Moment(Enum):
    """When bytes are counted. BACKWARD is after the last backward of a step and before the step."""

    BUILT = "built"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEPPED = "stepped"


DTYPE_NBYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes an element of the dtypes that a recipe may name."""

PRECISIONS = ("fp32", "bf16", "fp16")

FEATURES = frozenset(
    [
        "full_gradients",
        "full_optimizer_state",
        "accumulation",
        "caller_accumulation",
        "bucket",
        "clipping",
        "loss_scaling",
        "overflow_skip",
        "checkpoint",
        "reshard",
        "tied",
        "frozen",
        "unused",
        "groups",
        "schedule",
        "uneven",
        "broadcast_init",
        "overlap",
        "fp16",
        "sgd",
        "simulable",
    ]
)
"""What an implementation may support (specification section 2). A check names those it needs."""
