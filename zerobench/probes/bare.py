"""The same model run bare: what its activations alone hold as the gradient passes each boundary between units.

An implementation's live bytes inside backward, less its rest, less these, are what it added: gradients, buckets,
gathered weights. Gradients of the bare run are dropped as they come, so that only activations are left.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from zerobench.models import Model
from zerobench.probes.ledger import Ledger
from zerobench.record import Peak


class Bare(NamedTuple):
    """Bytes alive beyond the parameters: at each boundary of one forward, and of one backward, by its name; and the most
    within each (step -1), what a unit needs inside itself included."""

    ahead: dict[str, int]
    back: dict[str, int]
    peaks: tuple[Peak, ...]


def run_bare(model: Model, batch: tuple[Tensor, ...], dtype: torch.dtype, compute: str) -> Bare:
    """One forward and backward of a copy of the model.

    compute: "cast" runs with parameters of `dtype`, "autocast" with fp32 parameters under autocast to it.
    """
    module = copy.deepcopy(model.module)
    if compute == "cast":
        module.to(dtype)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
    ahead: dict[str, int] = {}
    back: dict[str, int] = {}
    with Ledger() as ledger:
        ledger.baseline()
        ledger.ignore(batch)
        enabled = compute == "autocast" and dtype != torch.float32
        model.observe_forward(lambda name: ahead.__setitem__(name, ledger.live()))
        try:
            with (
                ledger.phase(-1, "forward"),
                torch.autocast(batch[0].device.type, dtype=dtype, enabled=enabled),
            ):
                loss = module(*batch)
            model.observe_forward(None)
            model.observe(lambda name: back.__setitem__(name, ledger.live()))
            with ledger.phase(-1, "backward"):
                loss.backward()
        finally:
            model.observe_forward(None)
            model.observe(None)
    return Bare(ahead, back, tuple(ledger.peaks))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
