"""The engine of `rows`: what happens to all parameters, and in which order.

Reductions run in one fixed order on all ranks, last parameter first: a gradient that exists is sent once all before it
are. One is in flight at a time: at most two parameters' whole gradients are alive beside those that wait their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobench.implementations.protocol import Job, StepReport
from zerobench.mutants.rows_parameter import Row
from zerobench.mutants.rows_unit import Unit
from zerobench.terms import Category, Stage


class RowsEngine:
    """scale: what the loss is multiplied by. rows: of all parameters, in the module's order."""

    row: type[Row] = Row

    def __init__(self, job: Job, stage: Stage) -> None:
        self.job, self.stage, self.n = job, stage, job.world.size
        self.device = job.world.device
        self.overlap = bool(job.options.get("overlap", True))
        self.scale = 1.0
        if job.loss_scale is not None:
            self.scale = job.initial_scale if job.loss_scale == "dynamic" else float(job.loss_scale)
        if self.n > 1:
            for tensor in [*job.module.parameters(), *job.module.buffers()]:
                dist.broadcast(tensor.data, src=0)
        overrides = {
            id(p): {k: v for k, v in g.items() if k != "params"} for g in job.param_groups() for p in g["params"]
        }
        named = job.module.named_parameters()  # a tied weight once, under its first name
        self.rows = [self.row(name, p, job, stage, overrides.get(id(p), {})) for name, p in named]
        self.trained = [row for row in self.rows if row.trainable]
        self.units = self._units() if stage.shards(Category.PARAMETER) else []

        self._order = list(reversed(self.trained))
        self._ready: set[Row] = set()
        self._sent = 0
        self._in_flight: tuple[Row, list[dist.Work]] | None = None
        self._reducing = False
        self._handles = [
            row.parameter.register_post_accumulate_grad_hook(self._on_gradient(row))  # type: ignore[no-untyped-call]
            for row in self.trained
        ]

    def forward(self, batch: tuple[Tensor, ...], *, last: bool) -> Tensor:
        loss: Tensor = self.job.module(*batch)
        return loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._reducing = last or self.stage.shards(Category.GRADIENT)
        self._sent, self._ready = 0, set()
        if self._reducing and "unused" in self.job.features:
            reached = parameters_of(loss)
            self._ready = {row for row in self.trained if id(row.parameter) not in reached}
        for unit in self.units:
            unit.differentiating = True
        (loss * self.scale if self.scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        for unit in self.units:
            unit.differentiating = False
            unit.release()
        if self._reducing:
            self._ready.update(self.trained)  # whoever had no gradient has had none on this rank
            self._send()
            self._land()

    def step(self) -> StepReport:
        if self.job.loss_scale is not None and self._overflowed():
            self._clear()
            if self.job.loss_scale == "dynamic":
                self.scale /= 2
            return StepReport(skipped=True, loss_scale=self.scale)
        norm = coefficient = None
        if self.job.clip_norm is not None:
            norm = self._norm()
            coefficient = self._coefficient(norm, self.job.clip_norm)
        works = []
        for row in self.trained:
            row.update(self.scale, coefficient)
            if not self.stage.shards(Category.PARAMETER):
                works += row.spread()
        for work in works:
            work.wait()
        self._clear()
        return StepReport(
            grad_norm=None if norm is None else float(norm),
            loss_scale=None if self.job.loss_scale is None else self.scale,
        )

    def model_states(self) -> dict[Category, Sequence[Tensor]]:
        kept = self.stage.shards(Category.PARAMETER)
        partial = self.stage.shards(Category.GRADIENT)
        gradients = [row.gradient if partial else row.parameter.grad for row in self.trained]
        masters = [row.master for row in self.rows if row.master is not row.chunk]
        return {
            Category.PARAMETER: [row.chunk if kept else row.parameter for row in self.rows],
            Category.GRADIENT: [gradient for gradient in gradients if gradient is not None],
            Category.OPTIMIZER: [*masters, *(value for row in self.trained for value in row.state().values())],
        }

    def full_parameters(self) -> dict[str, Tensor]:
        return {row.name: row.assemble(row.master) for row in self.rows}

    def full_gradients(self) -> dict[str, Tensor]:
        return {row.name: row.assemble(row.unscaled(self.scale)) for row in self.trained}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return {
            row.name: {k: v.clone() if v.dim() == 0 else row.assemble(v) for k, v in row.state().items()}
            for row in self.trained
        }

    def save(self, path: Path) -> None:
        """Collective: a file a rank, `rank-<r>.pt`, with its chunks; rank 0's has the buffers and the scale as well."""
        rank = self.job.world.rank
        rows = {row.name: {"weight": row.master, "state": row.state()} for row in self.rows if rank < len(row.sizes)}
        shared = {"scale": self.scale, "buffers": dict(self.job.module.named_buffers())} if rank == 0 else {}
        torch.save({"rows": rows, **shared}, path / f"rank-{rank}.pt")
        if self.n > 1:
            dist.barrier()  # nobody may read before all have written

    def load(self, path: Path) -> None:
        """Collective: what any number of ranks saved. Chunks joined in the order of ranks are the whole."""
        files = sorted(path.glob("rank-*.pt"), key=lambda file: int(file.stem.removeprefix("rank-")))
        parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        self.scale = parts[0]["scale"]
        for name, buffer in self.job.module.named_buffers():
            buffer.copy_(parts[0]["buffers"][name])
        works = []
        for row in self.rows:
            pieces = [part["rows"][row.name] for part in parts if row.name in part["rows"]]
            state = {
                key: value if value.dim() == 0 else torch.cat([piece["state"][key] for piece in pieces])
                for key, value in pieces[0]["state"].items()
            }
            row.restore(torch.cat([piece["weight"] for piece in pieces]).view(-1), state)
            if not self.stage.shards(Category.PARAMETER):
                works += row.spread()
        for work in works:
            work.wait()

    def set_lr_factor(self, factor: float) -> None:
        for row in self.trained:
            row.set_lr_factor(factor)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unit.close()

    def _units(self) -> list[Unit]:
        """The job's units, and the root with what is in none of them or in several."""
        homes: dict[int, list[nn.Module]] = {}
        for module in self.job.units:
            for parameter in module.parameters():
                homes.setdefault(id(parameter), []).append(module)
        members: dict[nn.Module, list[Row]] = {module: [] for module in (*self.job.units, self.job.module)}
        for row in self.rows:
            home = homes.get(id(row.parameter), [])
            members[home[0] if len(home) == 1 else self.job.module].append(row)
        return [Unit(module, rows) for module, rows in members.items() if rows]

    def _on_gradient(self, row: Row) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not self._reducing:
                return
            if row in self._ready:
                raise RuntimeError(f"{row.name} got a gradient after it was reduced: the loss's graph did not show it")
            self._ready.add(row)
            self._send()

        return hook

    def _send(self) -> None:
        """Reduce what is ready, as far as the fixed order allows."""
        while self._sent < len(self._order) and self._order[self._sent] in self._ready:
            row = self._order[self._sent]
            self._land()
            self._in_flight = row, row.reduce()
            self._sent += 1
            if not self.overlap:
                self._land()

    def _land(self) -> None:
        """Wait for the reduction in flight, if there is one, and take its chunk."""
        if self._in_flight is not None:
            row, works = self._in_flight
            for work in works:
                work.wait()
            row.reduced()
            self._in_flight = None

    def _overflowed(self) -> bool:
        """Collective: whether any rank's part of the gradient has an inf or a nan."""
        finite = [torch.isfinite(row.gradient).all() for row in self.trained if row.gradient is not None]
        bad = torch.logical_not(torch.stack(finite).all()).float()
        if self.n > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad)

    def _norm(self) -> Tensor:
        """Collective: the 2-norm of the whole mean gradient, unscaled; a 0-dim fp32 tensor, the same on every rank."""
        squares = torch.stack([self._square(row) for row in self.trained]).sum()
        if self.n > 1 and self.stage.shards(Category.OPTIMIZER):
            dist.all_reduce(squares)
        return squares.sqrt()

    def _square(self, row: Row) -> Tensor:
        """What this rank's chunk adds to the square of the norm."""
        norm: Tensor = torch.linalg.vector_norm(row.unscaled(self.scale))
        return norm.square()

    def _coefficient(self, norm: Tensor, limit: float) -> Tensor:
        """What gradients of this norm are multiplied by. The formula is torch.nn.utils.clip_grad_norm_'s."""
        return (limit / (norm + 1e-6)).clamp(max=1.0)

    def _clear(self) -> None:
        for row in self.trained:
            row.clear()


def parameters_of(loss: Tensor) -> set[int]:
    """ids of the leaves that the loss's autograd graph leads to."""
    found: set[int] = set()
    seen = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack += [following for following, _ in node.next_functions]
    return found
