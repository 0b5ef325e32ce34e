"""What a run does, as data. A check names the scenarios that it needs; the worker, and it alone, carries one out.

No torch here: the judging side plans runs from the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerobench.claims import OptimizerSpec

ADAMW = OptimizerSpec("adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
SGD = OptimizerSpec("sgd", lr=0.25, momentum=0.5)
"""Powers of two, so that on the dyadic model every update is exact. SGD because Adam cannot see the scale of a
gradient."""

PLAIN_SGD = OptimizerSpec("sgd", lr=0.25)
TINY = OptimizerSpec("sgd", lr=2.0**-14)
"""Updates below half an ulp of most 16-bit weights."""

NOT_SIMULATED = "simulated: there are bytes and collectives, but no values, seconds, sockets or system"
"""Why what asks for more of a simulated run is skipped."""

RESUME_AT = 2
"""Steps before a checkpoint is saved; the run that loads it goes on with this one."""


@dataclass(frozen=True)
class Scenario:
    """One way to drive an engine. What is None is the case's own.

    watch: which probes and comparisons take part: "memory", "time", "wire", "work", "bits" (digests of whole parameters
    after every step), "flight" (what is computed while gradients travel), "resident" (what the system sees), and of
    these one: "oracle", "states", "trajectory", "clipping".
    timed: bare steps whose seconds are taken, where "time" is watched, and more until they have taken `timed_s` seconds.
    bucket: elements, "unit" for the largest unit, or a divisor of Psi as "Psi/8"; None leaves it to the implementation.
    gpu_model: the model on a GPU, where `model` would be too small to see.
    features: what an implementation must support to be asked for it.
    grouped: every other parameter in a group of half the learning rate and with weight decay, and an empty group.
    lr_factors: what every learning rate is multiplied by, step by step, where a schedule changes it.
    by_caller: the caller accumulates: the engine is told of one micro-batch, gets A, and the caller divides each loss.
    options: what the implementation is told beside the suite's options; one that does not read them is not asked.
    poison: the loss of the last rank is multiplied by this ("inf" or "nan") at step `poisoned`.
    apart: ranks start from different weights. delayed: ranks enter collectives late, in turns, and freed memory is
    overwritten. evaluated: a forward without gradients after every step.
    checkpoint: "save" after RESUME_AT steps, or "load" what the run of the scenario `loads` saved, at `world` times
    its n.
    """

    name: str
    about: str
    watch: frozenset[str]
    optimizer: OptimizerSpec = ADAMW
    model: str | None = None
    gpu_model: str | None = None
    micro_batches: int | None = None
    warmup: int | None = None
    measured: int | None = None
    timed: int = 7
    timed_s: float = 0.0
    bucket: str | None = "Psi/8"
    features: frozenset[str] = frozenset()
    grouped: bool = False
    lr_factors: tuple[float, ...] = ()
    by_caller: bool = False
    options: tuple[tuple[str, object], ...] = ()
    clip_norm: float | None = None
    loss_scale: float | str | None = None
    initial_scale: float = 65536.0
    poison: str | None = None
    poisoned: int = 1
    apart: bool = False
    delayed: bool = False
    evaluated: bool = False
    checkpoint: str | None = None
    loads: str | None = None
    world: float = 1.0

    @property
    def simulable(self) -> bool:
        """Whether it asks only what tensors without memory can answer: bytes and collectives, no values, seconds or
        sockets. Steps are not timed then."""
        return self.watch <= {"memory", "work", "time"} and not (self.poison or self.checkpoint or self.delayed)

    @property
    def first_step(self) -> int:
        return RESUME_AT if self.checkpoint == "load" else 0


def _exact(name: str, about: str, *features: str, model: str = "dyadic", **more: object) -> Scenario:
    """Three steps of SGD with momentum on an exact model, against the oracle, bit for bit."""
    base = Scenario(name, about, frozenset({"oracle"}), SGD, model, warmup=0, measured=3)
    return replace(base, features=frozenset({"sgd", *features}), **more)  # type: ignore[arg-type]


def _memory() -> list[Scenario]:
    watch = frozenset({"memory"})
    rows = [
        Scenario(
            "plain",
            "Train steps with Adam; count bytes, collectives and updated elements; time bare steps.",
            watch | {"time", "work"},
        ),
        Scenario(
            "evaluation",
            "A forward without gradients after every step must leave nothing behind and change nothing.",
            watch | {"bits"},
            SGD,
            evaluated=True,
            features=frozenset({"sgd"}),
        ),
        Scenario(
            "flight",
            "Hold each reduction until backward has done one more unit; on NCCL, read the kernel timeline: is computing "
            "going on meanwhile?",
            frozenset({"flight"}),
            model="stack-8",
            gpu_model="mlp-268m",
            warmup=1,
            measured=1,
            micro_batches=1,
            bucket="unit",
            features=frozenset({"overlap"}),
        ),
        Scenario(
            "wire",
            "A model large enough that message headers are small beside the payload: the wire as witness of the log, and "
            "the C allocator as witness of the ledger.",
            watch | {"wire"},
            model="mlp-2m",
            warmup=1,
            measured=2,
        ),
        Scenario(
            "frozen",
            "A model with frozen parameters: they cost their own weights only.",
            watch,
            model="dyadic-frozen",
            features=frozenset({"frozen"}),
            warmup=1,
            measured=2,
        ),
    ]
    for name, (model, gpu_model) in SIZES.items():
        rows.append(
            Scenario(
                name,
                "The same layers, more of them: what every instrument sees must grow as the ledger does.",
                watch | {"resident"},
                model=model,
                gpu_model=gpu_model,
                warmup=1,
                measured=1,
            )
        )
    for depth in DEPTHS:
        rows.append(
            Scenario(
                f"depth-{depth}",
                f"{depth} equal blocks, one bucket a block: what backward holds beyond rest must not grow with depth.",
                watch,
                model=f"stack-{depth}",
                warmup=1,
                measured=2,
                bucket="unit",
            )
        )
    return rows


def _timed() -> list[Scenario]:
    """Launches that are compared by their seconds: each implementation with the buckets that it chooses itself."""
    timed = Scenario(
        "timed",
        "Time bare steps, more of them than elsewhere, and look at nothing else.",
        frozenset({"time"}),
        warmup=1,
        measured=1,
        timed=15,
        timed_s=1.0,  # the median of 15 steps of 5 ms is whatever the machine did in that tenth of a second
        bucket=None,
    )
    return [
        timed,
        replace(
            timed,
            name="timed-sgd",
            about="The same with an optimizer that costs next to nothing.",
            optimizer=PLAIN_SGD,
            features=frozenset({"sgd"}),
        ),
    ]


def _accumulation() -> list[Scenario]:
    return [
        Scenario(
            f"accumulate-{a}",
            f"{a} micro-batches a step: what is sent as a function of A.",
            frozenset(),
            micro_batches=a,
            features=frozenset({"accumulation"}),
        )
        for a in (2, 4)
    ]


def _numerics() -> list[Scenario]:
    states = frozenset({"full_gradients", "full_optimizer_state"})
    trajectory = Scenario(
        "trajectory-adam", "Five Adam steps beside DDP's arithmetic.", frozenset({"trajectory"}), warmup=0, measured=5
    )
    repeat = Scenario(
        "repeat-1",
        "Three steps whose bits must be the same when they are run again.",
        frozenset({"bits"}),
        SGD,
        warmup=0,
        measured=3,
        features=frozenset({"sgd"}),
    )
    clip = Scenario(
        "clip-above",
        "Clipping by a norm far below the gradient's: every update is scaled alike.",
        frozenset({"clipping"}),
        PLAIN_SGD,
        warmup=0,
        measured=3,
        clip_norm=2.0**-6,
        features=frozenset({"clipping", "full_gradients", "sgd"}),
    )
    return [
        _exact("dyadic", "Exact arithmetic, different data on each rank, against the oracle."),
        Scenario(
            "adam",
            "Each Adam step judged from the state before it.",
            frozenset({"states"}),
            warmup=0,
            measured=3,
            features=states,
        ),
        trajectory,
        replace(
            trajectory,
            name="trajectory-sgd",
            about="Five SGD steps with momentum beside DDP's arithmetic.",
            optimizer=SGD,
            features=frozenset({"sgd"}),
        ),
        replace(
            trajectory,
            name="tiny-updates",
            about="Updates below half an ulp of the 16-bit weight: only a master can add them up.",
            optimizer=TINY,
            features=frozenset({"sgd"}),
        ),
        _exact("dyadic-accumulate-2", "Two micro-batches a step, exactly.", "accumulation", micro_batches=2),
        _exact("dyadic-accumulate-4", "Four micro-batches a step, exactly.", "accumulation", micro_batches=4),
        _exact(
            "dyadic-caller-accumulate-2",
            "Two micro-batches a step of which the engine is not told: the caller divides each loss by two.",
            "caller_accumulation",
            micro_batches=2,
            by_caller=True,
        ),
        clip,
        replace(clip, name="clip-below", about="A threshold far above the norm: nothing changes.", clip_norm=2.0**20),
        _exact("scale-static", "A loss scale of 256 cancels exactly.", "loss_scaling", loss_scale=256.0),
        _exact("edges-shapes", "Sizes around n and around a bucket of 16.", model="shapes", bucket="16"),
        _exact("edges-giant", "One giant tensor and two tiny ones.", model="giant"),
        _exact("edges-tinier", "Fewer parameters than ranks.", "uneven", model="tinier"),
        _exact("tied", "A tied weight gets both gradients.", "tied", model="dyadic-tied"),
        _exact("unused", "A parameter that no loss uses.", "unused", model="dyadic-unused"),
        _exact("groups", "Interleaved groups of different learning rates, and an empty one.", "groups", grouped=True),
        _exact(
            "schedule",
            "Every step has another learning rate, in every group.",
            "groups",
            "schedule",
            grouped=True,
            lr_factors=(1.0, 0.5, 2.0),
        ),
        _exact("buffers", "A model with buffers that its forward updates.", model="dyadic-buffers"),
        _exact("apart", "Ranks that start apart train from rank 0's weights.", "broadcast_init", apart=True),
        _exact("bucket-small", "Buckets of 16 elements.", "bucket", bucket="16"),
        _exact("bucket-one", "One bucket for all.", "bucket", bucket="Psi/1"),
        _exact("overlap-off", "No reduction runs beside backward.", options=(("overlap", False),)),
        _exact("race", "Ranks enter collectives late, in turns; freed memory is overwritten.", delayed=True),
        *(
            _exact(
                f"overflow-{value}-{kind}",
                f"{value} on one rank at the second step, {kind} loss scale: all ranks skip.",
                "loss_scaling",
                "overflow_skip",
                loss_scale=256.0 if kind == "static" else "dynamic",
                initial_scale=256.0,
                poison=value,
            )
            for value, kind in (("inf", "static"), ("nan", "dynamic"), ("inf", "dynamic"))
        ),
        Scenario(
            "overflow-memory",
            "A skipped step leaves nothing behind.",
            frozenset({"memory"}),
            SGD,
            loss_scale=256.0,
            poison="inf",
            poisoned=2,
            features=frozenset({"sgd", "loss_scaling", "overflow_skip"}),
        ),
        repeat,
        replace(repeat, name="repeat-2"),
        replace(repeat, name="recompute-off", model="gpt-tiny"),
        replace(repeat, name="recompute", about="Activation checkpointing.", model="gpt-tiny-checkpointed"),
    ]


def _checkpoints() -> list[Scenario]:
    save = Scenario(
        "save",
        "Train with Adam, save after two steps, train on.",
        frozenset({"bits"}),
        warmup=0,
        measured=4,
        features=frozenset({"checkpoint", "full_optimizer_state"}),
        checkpoint="save",
    )
    exact = replace(
        save,
        name="save-exact",
        about="Train on the exact model, save after two steps.",
        watch=frozenset({"bits", "oracle"}),
        optimizer=SGD,
        model="dyadic",
        features=save.features | {"sgd"},
    )
    resumed = replace(exact, checkpoint="load", loads="save-exact", measured=2)
    load = replace(resumed, features=exact.features | {"reshard"})
    moments = replace(save, checkpoint="load", loads="save", measured=1, features=save.features | {"reshard"})
    return [
        save,
        replace(save, name="resume", about="Load and train on.", checkpoint="load", loads="save", measured=2),
        exact,
        replace(resumed, name="resume-exact", about="Load and train on, exactly."),
        replace(load, name="reshard-half", about="Load at half as many ranks, and train on.", world=0.5),
        replace(load, name="reshard-double", about="Load at twice as many ranks, and train on.", world=2.0),
        replace(moments, name="reshard-half-adam", about="Load Adam's states at half as many ranks.", world=0.5),
        replace(moments, name="reshard-double-adam", about="Load Adam's states at twice as many ranks.", world=2.0),
    ]


DEPTHS = (4, 32)
SIZES = {
    "size-1": ("mlp-2m", "mlp-134m"),
    "size-2": ("mlp-4m", "mlp-268m"),
    "size-3": ("mlp-8m", "mlp-537m"),
}
"""By scenario: the model on a CPU, and on a GPU, whose allocator's whole segments (20 MiB) must be small beside it."""
SCENARIOS = {s.name: s for s in (*_memory(), *_timed(), *_accumulation(), *_numerics(), *_checkpoints())}
