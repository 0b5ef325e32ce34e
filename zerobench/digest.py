"""Digests of tensors' bits: what a record keeps instead of the tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from zerobench.claims import Claims
from zerobench.record import Digest


def digest(tensors: Iterable[Tensor]) -> tuple[str, int]:
    """(digest, bytes) of the tensors' elements, dtypes and order; shapes do not count, so a flat copy equals the
    original."""
    hashed, nbytes = hashlib.blake2b(digest_size=16), 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().to("cpu").contiguous()
        hashed.update(str(flat.dtype).encode())
        size = flat.numel() * flat.itemsize
        if size:
            hashed.update(ctypes.string_at(flat.data_ptr(), size))
        nbytes += size
    return hashed.hexdigest(), nbytes


def whole_digests(engine: Any, claims: Claims, step: int) -> Iterator[Digest]:
    """Collective: of every whole parameter, and of every whole optimizer state where there is one, by name."""
    for name, tensor in sorted(engine.full_parameters().items()):
        yield Digest(step, f"parameter {name}", *digest([tensor]))
    if "full_optimizer_state" in claims.supports:
        for name, state in sorted(engine.full_optimizer_state().items()):
            for key, tensor in sorted(state.items()):
                value, nbytes = digest([tensor.reshape(-1)])
                kind = str(tensor.dtype).removeprefix("torch.")
                yield Digest(step, f"{key} {name}", f"{kind}:{value}", nbytes)
