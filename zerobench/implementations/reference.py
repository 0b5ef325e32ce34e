"""ZeRO, to be read: data-parallel training that shards model states, stages 0 to 3, in one engine.

What is sharded. Every rank trains the same model on its own data. Each of the three model states is whole on every rank
or cut into n parts of which a rank keeps one, by one comparison, `stage.shards(category)`:

    stage   OPTIMIZER   GRADIENT   PARAMETER
    0       whole       whole      whole        DDP
    1       part        whole      whole
    2       part        part       whole
    3       part        part       part

All this is done by the bucket (`buckets.py`): a unit's parameters in one flat tensor, cut into n equal parts wherever
a parameter ends. So shards are equal, and an update is a few large vector operations.

A step. In backward a hook moves each parameter's gradient into its bucket the moment it is complete. A bucket that has
all its gradients is reduced while backward goes on:

    stage 0   all-reduce        the whole mean gradient, on every rank       at the last micro-batch of a step
    stage 1   reduce-scatter    this rank's part of it                       at the last micro-batch
    stage 2   reduce-scatter    the same, and the whole gradient is freed    at every micro-batch, parts are summed
    stage 3   the same

Then torch.optim updates this rank's part of the fp32 weights with its part of the gradient, bucket by bucket, and the
new weights are all-gathered (stages 1 and 2). In stage 3 nobody holds whole weights for longer than a unit needs them:
they are gathered before its forward and freed after it, gathered again before its backward and freed as soon as the
bucket's gradients are there. Elements a step: 2 Psi (stages 0, 1), (A + 1) Psi (stage 2), 3 A Psi (stage 3).

Before the update a step may need one number about the whole gradient: its norm, to clip by it; whether it overflowed,
where there is a loss scale. One sum of squares answers both (`norm.py`): one element, all-reduced where gradients are
parts. After an overflow anywhere every rank skips the step, and nothing but the loss scale has changed.

Memory. In fp32 a parameter is its own master: no copy. In 16 bits the fp32 masters are held like the other optimizer
states. Of unsharded gradients stages 2 and 3 hold at most two buckets: one that fills and one that is on the wire. A
third waits for the second. (More are open only where gradients of several buckets come interleaved.)

Order. Ranks issue collectives in the order in which gradients come, so every rank must run the same graph. Buckets with
a parameter that has no gradient are reduced, in their order, after the others.

Frozen parameters are whole on every rank at every stage. A weight that several units share is the rest's, and the rest
is gathered around the root module's whole forward. Where activations are recomputed in backward, the weights gathered
for that backward serve both.

What a rank holds between steps, and how it is built, read whole, saved and loaded, is in `states.py`; here is the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerobench.claims import Claims
from zerobench.implementations.buckets import Bucket, Slot, allocate, allocated, free, plan
from zerobench.implementations.collectives import Work, all_gather, all_reduce, reduce_scatter
from zerobench.implementations.helpers import scale_rates
from zerobench.implementations.norm import clip_coefficient, sum_of_squares
from zerobench.implementations.protocol import Job, StepReport
from zerobench.implementations.states import ModelStates
from zerobench.terms import Category, Stage

UNSHARDED_GRADIENTS = 2
"""Whole gradient buckets alive at once at stages 2 and 3: one fills, one is on the wire."""


class Zero(ModelStates):
    """The engine of all four stages. Collective: every method but model_states."""

    def __init__(self, job: Job, stage: Stage) -> None:
        super().__init__(job, stage)
        self.micro_batches, self.clip_norm = job.micro_batches, job.clip_norm
        self.overlap = bool(job.options.get("overlap", True))
        self._in_flight: deque[tuple[Work, Bucket, Tensor]] = deque()
        self._due = self._in_backward = self._ready = False
        self._factor: Tensor | float | None = None
        self._hooks = list(self._add_hooks())

    def _add_hooks(self) -> Iterator[Any]:
        for bucket in self.buckets:
            for slot in bucket.slots:
                arrived = partial(self._arrived, bucket, slot)
                yield slot.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        if self.stage.shards(Category.PARAMETER):
            for unit in dict.fromkeys(bucket.unit for bucket in self.buckets):
                buckets = [bucket for bucket in self.buckets if bucket.unit is unit]
                yield unit.register_forward_pre_hook(lambda module, args, buckets=buckets: self._gather(buckets))
                yield unit.register_forward_hook(lambda module, args, out, buckets=buckets: self._passed(buckets, out))

    # -- parameters: stage 3 -------------------------------------------------------------------------------------------

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        """Make the whole weights of a unit exist."""
        works = []
        for bucket in buckets:
            if not allocated(bucket.weight):
                allocate(bucket.weight)
                works.append(all_gather(bucket.weight, bucket.kept, self.n))
        for work in works:
            work.wait()

    def _passed(self, buckets: Sequence[Bucket], output: Any) -> None:
        """After a unit's forward: free its weights until the gradient of its output exists.

        A forward inside backward recomputes activations for the backward that follows at once: the weights stay.
        """
        if self._in_backward:
            return
        for bucket in buckets:
            free(bucket.weight)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._gather(buckets))  # type: ignore[no-untyped-call]

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _arrived(self, bucket: Bucket, slot: Slot, parameter: Tensor) -> None:
        """A parameter's gradient of this backward is complete: it moves into the bucket."""
        assert parameter.grad is not None
        if slot not in bucket.missing:
            raise RuntimeError(f"a second gradient of {slot.name} in one backward: it may be on the wire already")
        self._open(bucket)
        bucket.add(slot, parameter.grad)
        parameter.grad = None
        if not bucket.missing:
            if self.stage.shards(Category.PARAMETER):
                free(bucket.weight)  # a weight's gradient is computed with its input's: nothing needs it any more
            if self._due:
                self._reduce(bucket)

    def _open(self, bucket: Bucket) -> None:
        """Make the bucket's whole gradient exist; first wait for one on the wire if there are too many."""
        if allocated(bucket.gradient):
            return
        while self._in_flight and sum(allocated(b.gradient) for b in self.buckets) >= UNSHARDED_GRADIENTS:
            self._settle()
        bucket.open()

    def _reduce(self, bucket: Bucket) -> None:
        """Start to sum the bucket over the ranks."""
        if not self.stage.shards(Category.OPTIMIZER):
            into, work = bucket.reduced, all_reduce(bucket.gradient, self.n)
        else:
            into = torch.empty_like(bucket.reduced) if bucket.partial else bucket.reduced
            work = reduce_scatter(into, bucket.gradient, self.n)
        self._in_flight.append((work, bucket, into))
        if not self.overlap:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction; at stages 2 and 3 take its part and free the whole."""
        work, bucket, into = self._in_flight.popleft()
        work.wait()
        if into is not bucket.reduced:
            bucket.reduced.add_(into)
        if self.stage.shards(Category.GRADIENT):
            bucket.partial = True
            free(bucket.gradient)

    # -- Engine --------------------------------------------------------------------------------------------------------

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        return self.module(*batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._due = last or self.stage.shards(Category.GRADIENT)
        self._in_backward = self._pending = True
        loss = loss / self.micro_batches
        if self.loss_scale.value is not None:
            loss = loss * self.loss_scale.value
        loss.backward()  # type: ignore[no-untyped-call]
        self._in_backward = False
        for bucket in self.buckets:
            if self._due and bucket.missing:
                self._open(bucket)
                bucket.fill()
                self._reduce(bucket)
            bucket.missing = set(bucket.slots)
            if self.stage.shards(Category.PARAMETER):
                free(bucket.weight)
        while self._in_flight:
            self._settle()
        self._ready = last

    def step(self) -> StepReport:
        """The report's loss scale is the one that this step's gradients had."""
        if not self._ready:
            raise RuntimeError("step() before backward(last=True)")
        scale = self.loss_scale.value
        norm = None if scale is None and self.clip_norm is None else self._norm()
        skipped = scale is not None and norm is not None and not bool(norm.isfinite())
        if not skipped:
            self._factor = self._gradient_factor(norm, scale)
            gathers = []
            for bucket in self.buckets:
                self._update(bucket)
                gathers.append(self._publish(bucket))
            for work in gathers:
                work.wait()
            self._stepped = True
        for bucket in self.buckets:
            bucket.blank, bucket.partial = set(bucket.slots), False
        self.loss_scale.update(skipped)
        self._ready = self._pending = False
        return StepReport(skipped, norm, scale)  # type: ignore[arg-type]

    def _norm(self) -> Tensor:
        """Of the whole mean gradient, unscaled: 0-dim, fp64, equal on all ranks; inf or nan after an overflow."""
        total = sum_of_squares((bucket.reduced for bucket in self.buckets), self.device)
        if self.stage.shards(Category.OPTIMIZER):
            all_reduce(total, self.n).wait()
        return total.sqrt() / (self.loss_scale.value or 1.0)

    def _gradient_factor(self, norm: Tensor | None, scale: float | None) -> Tensor | float | None:
        """What unscaling and clipping multiply gradients by, in one."""
        unscale = None if scale is None else 1 / scale
        if norm is None or self.clip_norm is None:
            return unscale
        return clip_coefficient(norm, self.clip_norm) * (unscale or 1.0)

    def _update(self, bucket: Bucket) -> None:
        """torch.optim on one bucket's part of the masters, with its part of the gradient in fp32.

        In fp32 it is unscaled and clipped where it is: nobody reads it after the step.
        """
        gradient = bucket.reduced.float()  # in fp32 no copy
        if self._factor is not None:
            gradient.mul_(self._factor)
        for view, where in self.runs[bucket]:
            view.grad = gradient[where]
        self.optimizer.step()  # views without a gradient, all other buckets', are left alone
        for view, _ in self.runs[bucket]:
            view.grad = None

    def set_lr_factor(self, factor: float) -> None:
        scale_rates(self.optimizer, factor)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))


class Reference:
    """One stage as a plug-in."""

    name: str
    stage: Stage
    supports = frozenset({"full_gradients", "full_optimizer_state", "accumulation", "bucket", "overlap", "fp16", "sgd"})
    supports |= {"tied", "frozen", "unused", "uneven", "groups", "schedule", "broadcast_init", "caller_accumulation"}
    supports |= {"clipping", "loss_scaling", "overflow_skip", "checkpoint", "reshard", "simulable"}

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        """The paper's stage. Whole tensors have all the padding, parts an n-th of it."""
        padding = sum(layout.padding for layout in plan(job, self.stage))
        if self.stage.shards(Category.PARAMETER):
            padding = -(-padding // job.world.size)
        supports = self.supports if job.options.get("overlap", True) else self.supports - {"overlap"}
        return Claims(stage=self.stage, supports=supports, padding_numel=padding, prefetch_units=0)

    def build(self, job: Job) -> Zero:
        return Zero(job, self.stage)


class Ddp(Reference):
    name, stage = "ddp", Stage.DDP


class Zero1(Reference):
    name, stage = "zero1", Stage.OPTIMIZER


class Zero2(Reference):
    name, stage = "zero2", Stage.GRADIENT


class Zero3(Reference):
    name, stage = "zero3", Stage.PARAMETER
