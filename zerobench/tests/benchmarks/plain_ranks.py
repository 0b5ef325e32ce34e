"""The training of a case without zerobench around it, as a script under torchrun: what a person would write by hand.

    torchrun --standalone --nproc-per-node 2 -m zerobench.tests.benchmarks.plain_ranks zero2 mlp-tiny 11

The steps of one rank: forward, backward, step, on the model and the engine that zerobench uses. Rank 0 prints seconds
from before the engine is built to after the last step.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch._dynamo  # the first torch.optim optimizer imports it, for seconds that are not training
import torch.distributed as dist

from zerobench.implementations.protocol import Job, World
from zerobench.implementations.registry import resolve
from zerobench.models import build
from zerobench.scenarios import SCENARIOS


def main(implementation: str, model_name: str, steps: int) -> None:
    torch.set_num_threads(1)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model = build(model_name, world_size=n, micro_batches=1, device="cpu")
    began = time.perf_counter()
    world = World(rank, n, torch.device("cpu"), "gloo")
    job = Job(model.module, model.units, world, "fp32", SCENARIOS["plain"].optimizer)
    engine = resolve(implementation).build(job)
    for step in range(steps):
        loss = engine.forward(model.batch(step, rank, 0), last=True)
        engine.backward(loss, last=True)
        engine.step()
    if rank == 0:
        print(f"{time.perf_counter() - began:.6f}", flush=True)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
