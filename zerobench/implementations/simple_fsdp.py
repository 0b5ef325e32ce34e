"""torchtitan's SimpleFSDP (experiments/graph_trainer/simple_fsdp.py): each parameter a DTensor that gathers itself.

What torchtitan documents (arXiv 2411.00284 and the module), and is claimed: `data_parallel(mode="fully_shard")` makes
each parameter a property that all-gathers where it is read; its gradient is reduce-scattered. Run eagerly, as here,
autograd keeps the gathered weights from forward to backward (what the paper frees is freed by torch.compile's pass), so
the claim is `gathered`: 2 A Psi a step.

Gradients are summed over the ranks, not averaged (Partial("sum")): torchtitan divides the loss by the tokens of all
ranks. So the loss is divided by n here.

data_parallel registers a new Parameter for each: tied weights come apart and frozen ones become trainable, so neither is
claimed. Mixed precision as torchtitan has it: weights and compute in 16 bits, gradients reduced in fp32.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.distributed.device_mesh import init_device_mesh

from zerobench.claims import Claims
from zerobench.implementations.fsdp2 import Fsdp2Engine, padding
from zerobench.implementations.helpers import by_streams
from zerobench.implementations.protocol import Job
from zerobench.implementations.torch_sharded import SUPPORTS, ShardedEngine, recipe, refuse
from zerobench.terms import Stage


class SimpleFsdpEngine(Fsdp2Engine):
    """Its parameters are DTensors as FSDP2's are; how they are made and gathered differs."""

    def __init__(self, job: Job) -> None:
        from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

        mesh = init_device_mesh(job.world.device.type, (job.world.size,))
        mixed = job.dtype != torch.float32
        policy = MixedPrecisionPolicy(job.dtype if mixed else None, torch.float32 if mixed else None)
        model = data_parallel(job.module, mesh, mode="fully_shard", mp_policy=policy)
        optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())
        ShardedEngine.__init__(self, job, model, optimizer)
        self._named = dict(model.named_parameters())
        self.micro_batches *= job.world.size  # what the loss is divided by: the sum over ranks becomes a mean


class SimpleFsdp:
    name = "simple-fsdp"
    imports = ("torchtitan.experiments.graph_trainer.simple_fsdp",)

    def unavailable(self) -> str | None:
        missing = importlib.util.find_spec("torchtitan") is None
        return "torchtitan is not installed; pip install 'zerobench[simplefsdp]'" if missing else None

    def claims(self, job: Job) -> Claims:
        return Claims(
            stage=Stage.PARAMETER,
            recipe=recipe(job.precision, "fp32"),
            supports=by_streams(job, SUPPORTS - {"frozen"}),
            padding_numel=padding(job, job.world.size),
            gathered=True,
        )

    def build(self, job: Job) -> SimpleFsdpEngine:
        refuse(job)
        return SimpleFsdpEngine(job)
