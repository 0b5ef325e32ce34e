"""A newcomer's first plug-in, in one file: torch's DistributedDataParallel, in fp32."""

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from zerobench import Claims, Stage, StepReport, Unsupported, torch_states


class Engine:
    def __init__(self, job):
        self.job = job
        self.ddp = DistributedDataParallel(job.module, gradient_as_bucket_view=True)
        self.optimizer = job.optimizer.torch()(job.param_groups(), **job.optimizer.options())

    def forward(self, batch, *, last):
        with nullcontext() if last else self.ddp.no_sync():
            return self.ddp(*batch)

    def backward(self, loss, *, last):
        (loss / self.job.micro_batches).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepReport()

    def model_states(self):
        return torch_states(self.job.module, self.optimizer)

    def full_parameters(self):
        return dict(self.job.module.named_parameters())

    def full_gradients(self):
        return {name: p.grad for name, p in self.job.module.named_parameters()}

    def full_optimizer_state(self):
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self.job.module.named_parameters()}

    def close(self):
        del self.ddp


class MyDdp:
    name = "my-ddp"

    def unavailable(self):
        return None

    def claims(self, job):
        return Claims(Stage.DDP, supports=frozenset({"full_gradients", "full_optimizer_state", "accumulation", "sgd"}))

    def build(self, job):
        if job.dtype != torch.float32:
            raise Unsupported("this one trains in fp32 only")
        return Engine(job)
