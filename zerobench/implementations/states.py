"""What a rank of the reference holds, outside of a step: built from a job, claimed, read whole, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerobench.implementations import checkpoint
from zerobench.implementations.buckets import Bucket, plan
from zerobench.implementations.collectives import Done, Work, all_gather, barrier, broadcast
from zerobench.implementations.loss_scale import LossScale
from zerobench.implementations.protocol import Job
from zerobench.terms import Category, Stage


class ModelStates:
    """The model states of one rank at a stage. Collective: every method but model_states.

    buckets: weights, masters, gradients. runs: of each bucket, the optimizer's parameters and the elements of the
    master that they are views of. optimizer: torch.optim, its state the moments and step counts. frozen: parameters
    that are whole on every rank.
    """

    def __init__(self, job: Job, stage: Stage) -> None:
        self.module, self.stage = job.module, stage
        self.n, self.rank, self.device = job.world.size, job.world.rank, job.world.device
        self._start_alike()
        groups = job.param_groups()
        self.buckets = [Bucket(layout, job.world, job.dtype, stage) for layout in plan(job, stage)]
        self.frozen = [p for p in self.module.parameters() if not p.requires_grad]
        for tensor in (*self.frozen, *self.module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(job.dtype)
        self.loss_scale = LossScale(job.loss_scale, job.initial_scale)
        self._spec, self._precision = job.optimizer, job.precision
        self._build_optimizer(groups)
        self._stepped = self._pending = False  # an update was made; a backward waits for its step

    def _start_alike(self) -> None:
        """Ranks may have built the module apart: rank 0's weights and buffers are everyone's."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        for work in [broadcast(tensor.detach(), self.n) for tensor in tensors]:
            work.wait()

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

    # -- read whole ----------------------------------------------------------------------------------------------------

    def full_parameters(self) -> dict[str, Tensor]:
        whole = self._named({bucket: bucket.master for bucket in self.buckets})
        return {name: whole.get(name, p.detach()) for name, p in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        """The mean, unscaled as the step will do it, unclipped."""
        scale = self.loss_scale.value
        return self._named({b: b.reduced if scale is None else b.reduced.float() * (1 / scale) for b in self.buckets})

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """torch.optim's state by parameter; nothing before the first update. A step count is what its owner says."""
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

    # -- saved and loaded ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """One file a rank; all are there when it returns. What is whole on every rank is written by rank 0.

        Raises RuntimeError between a backward and its step: gradients are not saved.
        """
        self._between_steps("save")
        owns = self.rank == 0 or self.stage.shards(Category.OPTIMIZER)
        content = {
            "job": self._job(),
            "stepped": self._stepped,
            "loss_scale": self.loss_scale.state(),
            "pieces": {
                name: piece
                for bucket in (self.buckets if owns else ())
                for name, piece in checkpoint.pieces(bucket, self.runs[bucket], self.optimizer.state).items()
            },
            "frozen": {n: p.detach().clone() for n, p in self._frozen().items()} if self.rank == 0 else {},
            "buffers": {name: buffer.clone() for name, buffer in self.module.named_buffers()},
        }
        checkpoint.write(path, self.rank, self.n, content)
        barrier(self.n)

    def load(self, path: Path) -> None:
        """Go on from what any number of ranks at any stage saved: weights, optimizer state and loss scale, bit for bit.

        Learning rates and other options stay the job's. Buffers are those of the rank of the same number, modulo the
        number that saved. Raises BadCheckpoint, before anything is changed, where files are missing or the saved model,
        precision or kind of optimizer is another one.
        """
        self._between_steps("load")
        files = checkpoint.read(path, self._job())
        for bucket in self.buckets:
            checkpoint.restore(bucket, self.runs[bucket], self.optimizer.state, files)
        for name, parameter in self._frozen().items():
            parameter.data.copy_(files[0]["frozen"][name])
        for name, buffer in self.module.named_buffers():
            buffer.copy_(files[self.rank % len(files)]["buffers"][name])
        self.loss_scale.restore(files[0]["loss_scale"])
        self._stepped = files[0]["stepped"]
        for work in [self._publish(bucket) for bucket in self.buckets]:
            work.wait()

    def _publish(self, bucket: Bucket) -> Work:
        """Make a bucket's weights what its masters say: rounded, and whole where the stage keeps them whole."""
        if bucket.master is not bucket.kept:
            bucket.kept.copy_(bucket.master)
        if self.stage.shards(Category.OPTIMIZER) and not self.stage.shards(Category.PARAMETER):
            return all_gather(bucket.weight, bucket.kept, self.n)
        return Done()

    def _frozen(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if not p.requires_grad}

    def _job(self) -> dict[str, Any]:
        """What a checkpoint and the job that loads it must agree on."""
        slots = {slot.name: list(slot.parameter.shape) for bucket in self.buckets for slot in bucket.slots}
        return {
            "precision": self._precision,
            "optimizer": f"{self._spec.kind}, {self._spec.moments} moments",
            "parameters": slots,
            "frozen parameters": {name: list(p.shape) for name, p in self._frozen().items()},
            "buffers": {name: list(buffer.shape) for name, buffer in self.module.named_buffers()},
        }

    def _between_steps(self, what: str) -> None:
        if self._pending:
            raise RuntimeError(f"{what}() between a backward and its step: gradients would be lost")
