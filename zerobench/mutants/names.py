"""The mutants by name: the fault, where it was seen in public, and the checks that must kill it. No torch.

A mutant is a correct implementation with one real fault planted. Its base is the reference at some stage; everything but
the fault is the base's, so that what kills it is the fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """reference: where ranks find it. killers: checks of which each must kill it. stands_for: the public report.
    precision, world_size: where it shows. loud: the fault itself is a crash or a hang; every other one is silent, and
    a kill by crash alone would prove nothing."""

    name: str
    fault: str
    stands_for: str
    killers: tuple[str, ...]
    reference: str
    precision: str = "bf16"
    world_size: int = 2
    loud: bool = False


def _row(
    chapter: str, name: str, fault: str, stands_for: str, *killers: str, precision: str = "bf16", loud: bool = False
) -> Mutant:
    kind = "".join(word.capitalize() for word in name.split("-"))
    reference = f"zerobench.mutants.{chapter}:{kind}"
    return Mutant(name, fault, stands_for, killers, reference, precision, loud=loud)


_ROWS = (
    _row(
        "memory",
        "replicated-moments",
        "stage 2 whose ranks keep Adam's first moment whole as well as sharded",
        "deepspeedai/DeepSpeed#4093 (memory does not fall with n)",
        "memory.at_rest",
    ),
    _row(
        "memory",
        "stage-zero-in-disguise",
        "says stage 1, shards nothing",
        "facebookresearch/fairscale#1050 (as much memory as DDP)",
        "memory.at_rest",
        "memory.scaling",
        "traffic.kinds",
    ),
    _row(
        "memory",
        "claims-half",
        "lists only every other of its optimizer tensors as model states",
        "deepspeedai/DeepSpeed#5099 (estimates that disagree with what is held)",
        "memory.at_rest",
    ),
    _row(
        "memory",
        "claims-clones",
        "claims fresh copies of its states, while the real ones stay alive",
        "NVIDIA/Megatron-LM#654 (18 bytes a parameter where 16 are expected)",
        "memory.unclaimed",
    ),
    _row(
        "memory",
        "leaked-full-gradient",
        "stage 2 that keeps a whole copy of the last reduced gradient",
        "pytorch/pytorch#139234 (gradients of earlier iterations still alive)",
        "memory.unclaimed",
    ),
    _row(
        "memory",
        "reduce-after-backward",
        "stage 2 that reduces only when backward is over: every whole bucket is alive at once",
        "NVIDIA/Megatron-LM#6314 (one unsharded bucket of full model size)",
        "memory.gradient_peak",
        "memory.depth",
    ),
    _row(
        "memory",
        "kept-view",
        "stage 2 whose gradient shard is a view, so that the whole gradient's storage stays alive",
        "facebookresearch/fairscale#627 (gradients stay unsharded after backward)",
        "memory.unclaimed",
        "memory.depth",
    ),
    _row(
        "memory",
        "leak-per-step",
        "keeps one more small buffer after every step",
        "EleutherAI/DeeperSpeed#66 (buffers kept for the rest of training)",
        "memory.rest_returns",
    ),
    _row(
        "traffic",
        "all-reduce-instead",
        "stage 2 that all-reduces each bucket and keeps its part",
        "deepspeedai/DeepSpeed#5758 (all-reduce although reduce-scatter is asked for)",
        "traffic.volume",
        "traffic.kinds",
    ),
    _row(
        "traffic",
        "gathers-twice",
        "stage 1 that all-gathers the new weights twice",
        "Robbyant/lingbot-vla#50 (extra all-gathers)",
        "traffic.volume",
    ),
    _row(
        "traffic",
        "reduces-every-micro-batch",
        "says stage 1, and reduces at every micro-batch",
        "meta-pytorch/torchtune#1275 (full gradient sync at every micro-batch)",
        "traffic.accumulation",
    ),
    _row(
        "traffic",
        "rank-dependent-dtype",
        "one rank enters a collective with another dtype and count of the same bytes",
        "pytorch/pytorch#69031 (ranks disagree on what is synced)",
        "traffic.order",
    ),
    _row(
        "traffic",
        "traffic-outside-the-log",
        "moves the whole gradient once more through the backend itself, beneath what torch dispatches",
        "deepspeedai/DeepSpeed#264 (gradients reduced twice)",
        "traffic.closure",
    ),
    _row(
        "numerics",
        "sums-instead-of-mean",
        "applies the sum over ranks",
        "pytorch/pytorch#162338 (an average that is a sum)",
        "numerics.gradient",
        "numerics.update",
    ),
    _row(
        "numerics",
        "forgets-one-bucket",
        "never reduces the last bucket: each rank uses its own gradient there",
        "deepspeedai/DeepSpeed#5154 (reduces the wrong buffer)",
        "numerics.gradient",
        "numerics.update",
    ),
    _row(
        "numerics",
        "drops-early-micro-batches",
        "the last micro-batch's gradient overwrites the others'",
        "allenai/open-instruct#1498 (only the last micro-batch counts)",
        "numerics.gradient",
    ),
    _row(
        "numerics",
        "stale-gather",
        "stage 1 that gathers the new weights only at every other step",
        "huggingface/accelerate#106 (ranks that silently diverge)",
        "numerics.sync",
        "numerics.gradient",
        "numerics.loss",
    ),
    _row(
        "numerics",
        "step-count-off",
        "Adam's step count advances twice a step",
        "deepspeedai/DeepSpeed#1599 (counters that go on when they should not)",
        "numerics.adam",
        "numerics.loss",
        precision="fp32",
    ),
    _row(
        "numerics",
        "no-master",
        "updates the 16-bit weights themselves: small updates round to nothing",
        "ZeRO paper, section 3.1 (why mixed precision keeps fp32 masters)",
        "numerics.adam",
        "memory.at_rest",
    ),
    _row(
        "runtime",
        "one-rank-raises",
        "one rank raises in its second backward",
        "pytorch/pytorch#99174 (a rank without any shard breaks)",
        "runtime.completes",
        loud=True,
    ),
    _row(
        "runtime",
        "one-rank-hangs",
        "one rank never comes to the second step's reduction",
        "deepspeedai/DeepSpeed#2970 (ranks out of step)",
        "runtime.completes",
        loud=True,
    ),
    _row(
        "runtime",
        "changes-the-house",
        "leaves torch's default dtype changed",
        "pytorch/pytorch#91165 (side effects on global state)",
        "runtime.completes",
        loud=True,
    ),
)
MUTANTS = {mutant.name: mutant for mutant in _ROWS}
