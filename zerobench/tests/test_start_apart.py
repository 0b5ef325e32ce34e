"""Ranks that built the module apart train from rank 0's weights and buffers."""

from __future__ import annotations

import torch

from zerobench import models
from zerobench.scenarios import SGD
from zerobench.tests.ranks import join, run_ranks
from zerobench.tests.test_reference import assert_same, copies, fp64_history, job_of
from zerobench.tests.test_reference_features import ALL, backward


def _apart(rank: int, n: int, store: str) -> None:
    join(rank, n, store)
    for implementation in ALL:
        for precision in ("fp32", "bf16"):
            model = models.build("dyadic-buffers", world_size=n, micro_batches=1)
            with torch.no_grad():
                for tensor in (*model.module.parameters(), *model.module.buffers()):
                    tensor.mul_(1 + rank)
            engine = implementation().build(job_of(model, rank, n, precision))
            start = models.build("dyadic-buffers", world_size=n, micro_batches=1).module
            what = (implementation.name, precision)
            assert_same(copies(engine.full_parameters()), dict(start.named_parameters()), what)
            assert_same(dict(model.module.named_buffers()), dict(start.named_buffers()), what)
            for step, expected in enumerate(fp64_history("dyadic-buffers", n, 1, 3, SGD)):
                backward(engine, model, step, rank)
                engine.step()
                assert_same(copies(engine.full_parameters()), expected, (*what, step))
            engine.close()


def test_ranks_that_start_apart_train_from_rank_0s_weights() -> None:
    run_ranks(_apart, 3)
