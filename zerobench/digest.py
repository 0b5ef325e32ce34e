"""Digests of tensors' bits: what a record keeps instead of the tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

from torch import Tensor


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
