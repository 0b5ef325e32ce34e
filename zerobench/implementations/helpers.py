"""What every adapter around torch modules and optimizers needs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from zerobench.implementations.protocol import Job
from zerobench.terms import Category


def torch_states(module: nn.Module, optimizer: Optimizer) -> dict[Category, list[Tensor]]:
    """The model states of a module and its torch.optim optimizer, each storage region once.

    PARAMETER: the module's parameters. GRADIENT: their `.grad`. OPTIMIZER: the optimizer's state, and the parameters it
    updates that are not the module's own (masters).
    """
    own = list(module.parameters())
    ours = {id(p) for p in own}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in [*own, *masters] if p.grad is not None]
    return {
        Category.PARAMETER: distinct(own),
        Category.GRADIENT: distinct(gradients),
        Category.OPTIMIZER: distinct([*masters, *states]),
    }


def by_streams(job: Job, supports: frozenset[str]) -> frozenset[str]:
    """`supports`, and "overlap" on a GPU: for a library that reduces on another stream of the device, and on a CPU, which
    has no streams, waits for each reduction where it issues it (seen by traffic.overlap)."""
    return supports | {"overlap"} if job.world.device.type == "cuda" else supports


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Every group's learning rate is now `factor` times its first one, kept as torch's schedulers keep it."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`tensors` without those that show the same memory again (tied weights, views of the same region)."""
    seen: set[tuple[int, int, int]] = set()
    out = []
    for tensor in tensors:
        # Not the address: without memory (a simulation) there is none.
        key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize, tensor.numel())
        if tensor.numel() and key not in seen:
            seen.add(key)
            out.append(tensor)
    return out
