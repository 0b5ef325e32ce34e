"""More mutants of the second implementation (`rows`)."""

from __future__ import annotations

from zerobench.mutants.mutant import Mutant, row


def _rows(name: str, fault: str, stands_for: str, *killers: str, world_size: int = 2) -> Mutant:
    return row("planted_more", name, fault, stands_for, *killers, world_size=world_size)


ROWS = (
    _rows(
        "averaged-twice",
        "divides by n twice",
        "pytorch/torchtitan#2318 (gradients averaged twice)",
        "numerics.gradient",
    ),
    _rows(
        "never-zeroed",
        "adds the gradient of the step before",
        "deepspeedai/DeepSpeed#7839 (gradients never zeroed)",
        "numerics.gradient",
    ),
    _rows(
        "unused-drifts",
        "moves a parameter that no loss uses",
        "pytorch/pytorch#128949 (unused parameters drift)",
        "numerics.unused",
    ),
    _rows(
        "scale-stuck",
        "a dynamic loss scale that never falls",
        "deepspeedai/DeepSpeed#3008 (scale not reduced)",
        "numerics.overflow",
    ),
    _rows(
        "second-gradient-copy",
        "keeps a second copy of every reduced gradient",
        "pytorch/pytorch#41954 (a second copy of the gradients)",
        "memory.unclaimed",
    ),
    _rows(
        "both-reductions",
        "all-reduces every gradient, and then reduces it to its owner",
        "deepspeedai/DeepSpeed#264 (an all-reduce and a reduce-scatter)",
        "traffic.volume",
        "traffic.kinds",
    ),
    _rows(
        "one-step-behind",
        "updates with the gradient of the step before",
        "NVIDIA/Megatron-LM#663 (stale values under overlap)",
        "numerics.update",
    ),
    _rows(
        "never-updates",
        "updates tensors that the module no longer reads",
        "pytorch/pytorch#149205 (an optimizer that never updates)",
        "numerics.moved",
        "numerics.update",
    ),
    _rows(
        "local-norm-reported",
        "clips by the global norm and reports the local one",
        "deepspeedai/DeepSpeed#7837 (a per-rank norm reported)",
        "numerics.clip",
    ),
    _rows(
        "rates-shift",
        "a changed learning rate reaches the next group",
        "OpenRLHF/OpenRLHF#1234 (a scheduler's rates shift to the wrong group)",
        "numerics.groups",
    ),
    _rows(
        "loses-the-odd-end",
        "loses the last element of a parameter that n does not divide, on loading",
        "pytorch/torchtitan#1136 (resume differs when not divisible by n)",
        "state.resume",
        world_size=3,
    ),
    _rows(
        "travels-in-another-sixteen",
        "sends bf16 gradients as fp16",
        "deepspeedai/DeepSpeed#2970 (gradients travel in another dtype)",
        "traffic.dtype",
    ),
    _rows(
        "gathers-all-at-once",
        "stage 3 that gathers every unit for the first",
        "facebookresearch/fairscale#1159 (blocks that are not resharded)",
        "memory.parameter_peak",
    ),
)
