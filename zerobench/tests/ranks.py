"""Run a function on real gloo ranks of this machine, for tests: fresh processes, a deadline, none left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


def run_ranks(work: Callable[..., Any], n: int, *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """[work(rank, n, store, *args) for each rank], each in a process of its own; `store` is the path of a FileStore.

    `work` is a function of a test module. Raises AssertionError with the stack of a rank that raised or died, and of
    "deadline" for one that was too slow.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "zerobench.probes.traffic"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        try:
            for rank in range(n):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(there, work, rank, n, os.path.join(folder, "store"), args)
                )
                process.start()
                there.close()
                pipes.append(here)
                ranks.append(process)
            return [_answer(pipe, time.monotonic() + deadline_s) for pipe in pipes]
        finally:
            for process in ranks:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()


def _answer(pipe: Any, until: float) -> Any:
    if not pipe.poll(max(until - time.monotonic(), 0)):
        raise AssertionError("a rank missed its deadline")
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise AssertionError("a rank died without an answer") from None
    if not ok:
        raise AssertionError(value)
    return value


def _rank(pipe: Any, work: Callable[..., Any], rank: int, n: int, store: str, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send((True, work(rank, n, store, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def join(rank: int, n: int, store: str) -> None:
    """Initialise the default process group on gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n)
