"""DDP with torch.distributed.optim.ZeroRedundancyOptimizer: stage 1 beside DDP.

What torch documents, and is claimed: each rank's optimizer keeps the states of whole parameters, about Psi/n elements
of them, packed greedily by size and never cut, and after its step broadcasts those parameters to all others. DDP has
all-reduced the gradient before that, so a step moves 2 Psi + 1 Psi, where the paper's stage 1 moves 2 Psi
(pytorch/pytorch#69591).

The ranks' shares are uneven (one matrix larger than Psi/n is one rank's); their sum is exactly that of stage 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from zerobench.claims import Claims
from zerobench.implementations.helpers import distinct, torch_states
from zerobench.implementations.protocol import Job
from zerobench.implementations.torch_ddp import FP32, TorchDdp, TorchDdpEngine
from zerobench.terms import Category, Stage


class TorchZeroEngine(TorchDdpEngine):
    """Collective: what is of TorchDdpEngine, and step."""

    optimizer: ZeroRedundancyOptimizer

    def _optimizer(self, job: Job) -> Optimizer:
        return ZeroRedundancyOptimizer(
            job.param_groups(), optimizer_class=job.optimizer.torch(), **job.optimizer.options()
        )

    def model_states(self) -> dict[Category, list[Tensor]]:
        states = torch_states(self.module, self.optimizer.optim)  # the local optimizer has this rank's states
        states[Category.GRADIENT] = distinct([*self._views, *states[Category.GRADIENT]])
        return states

    def save(self, path: Path) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        super().save(path)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states: dict[int, dict[str, Any]] = {}
        for rank in range(self.world.size):
            self.optimizer.consolidate_state_dict(to=rank)
            if rank == self.world.rank:  # the next rank's turn takes it away again
                states = self.optimizer.state_dict()["state"]
        # The last one's turn leaves a copy of all states behind, for a state_dict that may be asked for later. It is
        # this reading's, not the training's, and there is no public way to let go of it.
        self.optimizer._all_state_dicts.clear()  # type: ignore[attr-defined]
        names = {id(p): name for name, p in self.module.named_parameters() if p.requires_grad}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        return {
            name: {k: v for k, v in states.get(i, {}).items() if isinstance(v, Tensor)} for i, name in enumerate(order)
        }


class TorchZero(TorchDdp):
    name = "torch-zero"

    def claims(self, job: Job) -> Claims:
        return Claims(stage=Stage.OPTIMIZER, recipe=FP32, supports=self.supports, volume="3", compute="autocast")

    def build(self, job: Job) -> TorchZeroEngine:
        return TorchZeroEngine(job)
