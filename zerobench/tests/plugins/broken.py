"""Plug-ins that are to be refused by name, or caught: each is `my_ddp.MyDdp` with one mistake."""

import torch.distributed as dist
from my_ddp import Engine, MyDdp

from zerobench import Claims, Stage


class WithoutBuild:
    name = "without-build"

    def unavailable(self):
        return None

    def claims(self, job):
        return Claims(Stage.DDP)


class Unfinished:
    """An engine that cannot show its weights."""

    forward, backward, step = Engine.forward, Engine.backward, Engine.step
    model_states, close, __init__ = Engine.model_states, Engine.close, Engine.__init__


class WithoutFullParameters(MyDdp):
    name = "without-full-parameters"

    def claims(self, job):
        return Claims(Stage.DDP, supports=frozenset({"sgd"}))

    def build(self, job):
        return Unfinished(job)


class MisspelledClaims(MyDdp):
    name = "misspelled-claims"

    def claims(self, job):
        return Claims(Stage.DDP, supports=frozenset({"clip"}), padding_numel=-1)


class EmptyPromise(MyDdp):
    """Says that it can save, and has no such method."""

    name = "empty-promise"

    def claims(self, job):
        return Claims(Stage.DDP, supports=frozenset({"checkpoint", "sgd"}))


def summed(_, bucket):
    """What replaces DDP's own reduction: the sum over ranks, and nobody divides."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class ForgetsToAverage(MyDdp):
    name = "forgets-to-average"

    def build(self, job):
        engine = super().build(job)
        engine.ddp.register_comm_hook(None, summed)
        return engine
