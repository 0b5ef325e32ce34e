"""What a run does, as data. A check names the scenario that it needs; the worker, and it alone, carries one out.

No torch here: the judging side plans runs from the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobench.claims import OptimizerSpec

ADAMW = OptimizerSpec("adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SGD = OptimizerSpec("sgd", lr=0.25, momentum=0.5)
"""Powers of two, so that on the dyadic model every update is exact. SGD because Adam cannot see the scale of a gradient."""


@dataclass(frozen=True)
class Scenario:
    """One way to drive an engine. What is None is the case's own.

    watch: which probes and comparisons take part ("memory", "time", "wire", "oracle", "states").
    bucket: elements, "unit" for the largest unit, or a divisor of Psi as "Psi/8"; None leaves it to the implementation.
    features: what an implementation must support to be asked for it.
    """

    name: str
    about: str
    watch: frozenset[str]
    optimizer: OptimizerSpec = ADAMW
    model: str | None = None
    micro_batches: int | None = None
    warmup: int | None = None
    measured: int | None = None
    bucket: str | None = "Psi/8"
    features: frozenset[str] = frozenset()


def _rows() -> list[Scenario]:
    memory = frozenset({"memory"})
    rows = [
        Scenario("plain", "Train steps with Adam; count bytes and collectives; time bare steps.", memory | {"time"}),
        Scenario(
            "wire",
            "A model large enough that message headers are small beside the payload: the wire as witness of the log.",
            frozenset({"wire"}),
            model="mlp-2m",
            warmup=1,
            measured=2,
        ),
        Scenario(
            "dyadic",
            "SGD with momentum on a model whose arithmetic is exact, different data on each rank, against the oracle.",
            frozenset({"oracle"}),
            SGD,
            model="dyadic",
            warmup=0,
            measured=3,
            features=frozenset({"sgd"}),
        ),
        Scenario(
            "adam",
            "Each Adam step judged from the state before it.",
            frozenset({"states"}),
            warmup=0,
            measured=3,
            features=frozenset({"full_gradients", "full_optimizer_state"}),
        ),
        Scenario(
            "trajectory-adam",
            "Five Adam steps beside DDP's arithmetic.",
            frozenset({"trajectory"}),
            warmup=0,
            measured=5,
        ),
        Scenario(
            "trajectory-sgd",
            "Five SGD steps with momentum beside DDP's arithmetic.",
            frozenset({"trajectory"}),
            SGD,
            warmup=0,
            measured=5,
            features=frozenset({"sgd"}),
        ),
    ]
    for a in (2, 4):
        rows.append(
            Scenario(
                f"accumulate-{a}",
                f"{a} micro-batches a step: what is sent as a function of A.",
                frozenset(),
                micro_batches=a,
                features=frozenset({"accumulation"}),
            )
        )
    for depth in DEPTHS:
        rows.append(
            Scenario(
                f"depth-{depth}",
                f"{depth} equal blocks, one bucket a block: what backward holds beyond rest must not grow with depth.",
                memory,
                model=f"stack-{depth}",
                warmup=1,
                measured=2,
                bucket="unit",
            )
        )
    return rows


DEPTHS = (4, 32)
SCENARIOS = {scenario.name: scenario for scenario in _rows()}
