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

Memory. In fp32 a parameter is its own master: no copy. In 16 bits the fp32 masters are held like the other optimizer
states. Of unsharded gradients stages 2 and 3 hold at most two buckets: one that fills and one that is on the wire. A
third waits for the second. (More are open only where gradients of several buckets come interleaved.)

Order. Ranks issue collectives in the order in which gradients come, so every rank must run the same graph. Buckets with
a parameter that has no gradient are reduced, in their order, after the others.

Frozen parameters are whole on every rank at every stage. A weight that several units share is the rest's, and the rest
is gathered around the root module's whole forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerobench.claims import Claims
from zerobench.implementations.buckets import Bucket, Slot, allocate, allocated, free, plan
from zerobench.implementations.collectives import Work, all_gather, all_reduce, reduce_scatter
from zerobench.implementations.protocol import Job, StepReport, Unsupported
from zerobench.terms import Category, Stage

UNSHARDED_GRADIENTS = 2
"""Whole gradient buckets alive at once at stages 2 and 3: one fills, one is on the wire."""


class Zero:
    """The engine of all four stages. Collective: every method but model_states."""

    def __init__(self, job: Job, stage: Stage) -> None:
        self.module, self.stage, self.n, self.micro_batches = job.module, stage, job.world.size, job.micro_batches
        groups = job.param_groups()
        self.buckets = [Bucket(layout, job.world, job.dtype, stage) for layout in plan(job, stage)]
        self.frozen = [p for p in self.module.parameters() if not p.requires_grad]
        for tensor in (*self.frozen, *self.module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(job.dtype)
        self._spec = job.optimizer
        self._build_optimizer(groups)
        self._in_flight: deque[tuple[Work, Bucket, Tensor]] = deque()
        self._due = self._in_backward = False
        self._ready = self._stepped = False
        self._hooks = list(self._add_hooks())

    def _build_optimizer(self, groups: list[dict[str, Any]]) -> None:
        """torch.optim over flat views of the masters: one a bucket and stretch of equal options, padding left out."""
        group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        flat: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        self.runs: dict[Bucket, list[tuple[nn.Parameter, slice]]] = {}
        for bucket in self.buckets:
            self.runs[bucket] = []
            for group, where in bucket.runs(group_of):
                view = nn.Parameter(bucket.master[where], requires_grad=False)
                flat[group]["params"].append(view)
                self.runs[bucket].append((view, where))
        self.optimizer = self._spec.torch()(flat, **self._spec.options())

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
        self._in_backward = True
        (loss / self.micro_batches).backward()  # type: ignore[no-untyped-call]
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
        if not self._ready:
            raise RuntimeError("step() before backward(last=True)")
        gathers = []
        for bucket in self.buckets:
            self._update(bucket)
            if self.stage.shards(Category.OPTIMIZER) and not self.stage.shards(Category.PARAMETER):
                gathers.append(all_gather(bucket.weight, bucket.kept, self.n))
            bucket.blank, bucket.partial = set(bucket.slots), False
        for work in gathers:
            work.wait()
        self._ready, self._stepped = False, True
        return StepReport()

    def _update(self, bucket: Bucket) -> None:
        """One bucket's part: its gradient in fp32, torch.optim on its masters, and the weights rounded from them."""
        gradient = bucket.reduced.float()  # in fp32 no copy
        for view, where in self.runs[bucket]:
            view.grad = gradient[where]
        self.optimizer.step()  # views without a gradient, all other buckets', are left alone
        for view, _ in self.runs[bucket]:
            view.grad = None
        if bucket.master is not bucket.kept:
            bucket.kept.copy_(bucket.master)

    def model_states(self) -> dict[Category, list[Tensor]]:
        shards = self.stage.shards
        masters = [b.master for b in self.buckets if b.master is not b.kept]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            Category.PARAMETER: [b.kept if shards(Category.PARAMETER) else b.weight for b in self.buckets]
            + self.frozen,
            Category.GRADIENT: [b.reduced if shards(Category.GRADIENT) else b.gradient for b in self.buckets],
            Category.OPTIMIZER: masters + [s for s in states if isinstance(s, Tensor)],
        }

    def full_parameters(self) -> dict[str, Tensor]:
        whole = self._named({bucket: bucket.master for bucket in self.buckets})
        return {name: whole.get(name, p.detach()) for name, p in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        return self._named({bucket: bucket.reduced for bucket in self.buckets})

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """torch.optim's state by parameter; nothing before the first step. A step count is what its owner says."""
        full: dict[str, dict[str, Tensor]] = {n: {} for n, p in self.module.named_parameters() if p.requires_grad}
        momentum = ("momentum_buffer",) if self._spec.momentum else ()
        keys = momentum if self._spec.kind == "sgd" else ("step", "exp_avg", "exp_avg_sq")
        for key in keys if self._stepped else ():
            parts = {bucket: torch.zeros_like(bucket.master) for bucket in self.buckets}
            for bucket, part in parts.items():
                for view, where in self.runs[bucket]:
                    part[where] = self.optimizer.state[view][key].to(part.device)
            for name, value in self._named(parts).items():
                full[name][key] = value.flatten()[0] if key == "step" else value
        return full

    def _named(self, parts: Mapping[Bucket, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by parameter name, in the module's order, of what ranks hold parts of."""
        whole = {bucket: self._whole(bucket, part) for bucket, part in parts.items()}
        found = {slot.name: slot.of(flat) for bucket, flat in whole.items() for slot in bucket.slots}
        return {name: found[name] for name, _ in self.module.named_parameters() if name in found}

    def _whole(self, bucket: Bucket, part: Tensor) -> Tensor:
        """The whole of which every rank holds a part; what is whole already as it is."""
        if part.numel() == bucket.padded:
            return part
        whole = part.new_empty(bucket.padded)
        all_gather(whole, part, self.n).wait()
        return whole

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
    supports |= {"tied", "frozen", "unused", "uneven", "groups"}

    def unavailable(self) -> str | None:
        return None

    def claims(self, job: Job) -> Claims:
        """The paper's stage. Whole tensors have all the padding, parts an n-th of it."""
        padding = sum(layout.padding for layout in plan(job, self.stage))
        if self.stage.shards(Category.PARAMETER):
            padding = -(-padding // job.world.size)
        return Claims(stage=self.stage, supports=self.supports, padding_numel=padding, prefetch_units=0)

    def build(self, job: Job) -> Zero:
        if job.clip_norm is not None:
            raise Unsupported("the reference does not clip gradients")
        if job.loss_scale is not None:
            raise Unsupported("the reference has no loss scale")
        return Zero(job, self.stage)


class Ddp(Reference):
    name, stage = "ddp", Stage.DDP


class Zero1(Reference):
    name, stage = "zero1", Stage.OPTIMIZER


class Zero2(Reference):
    name, stage = "zero2", Stage.GRADIENT


class Zero3(Reference):
    name, stage = "zero3", Stage.PARAMETER
