"""What the C allocator has handed out: the ledger's independent witness on a CPU.

glibc's `mallinfo2` counts blocks in use of all its arenas, whoever asked for them: torch, gloo's threads, oneDNN,
Python. Over a baseline it agrees with the ledger's live bytes to some 0.5 kB a tensor (torch's own objects around a
storage, and the cache of small blocks, which glibc counts as used), measured on tensors of 4 B to 3.6 MB, at 0.5 us a
reading. What a matrix product leaves behind in a library (0.5 MB, once) is in it too. Memory mapped without malloc is
not.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h
_M_PERTURB = -6  # malloc.h
_LARGEST_THRESHOLD = 32 << 20  # glibc takes no more (DEFAULT_MMAP_THRESHOLD_MAX on 64 bits)


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h (glibc 2.33): uordblks are bytes in use in arenas, hblkhd those in mapped blocks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


@cache
def _libc() -> Any | None:
    """glibc with mallinfo2, or None: another C library, or an older one whose mallinfo wraps at 4 GB."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    try:
        libc.mallinfo2.restype = _Mallinfo2
    except AttributeError:
        return None
    return libc


def prepare() -> bool:
    """Make readings exact and repeatable; once a process, before tensors exist. False where there is nothing to
    prepare.

    A block from a mapping of its own is counted in whole pages, and whether a block gets one depends on what was freed
    before. With the threshold fixed at its highest, blocks below 32 MiB come from the heap and count to 16 bytes.
    (At 64 kB, the other choice, the error doubled, to 1.1 kB a tensor, and a training step took half as long again.)
    """
    libc = _libc()
    return libc is not None and libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD) == 1


def poison_freed() -> bool:
    """Have freed memory overwritten from here on, so that whoever reads it after it was freed reads nonsense: 0xff
    bytes are NaN in every float dtype. False where the C library cannot."""
    libc = _libc()
    return libc is not None and libc.mallopt(_M_PERTURB, 0xFF) == 1


def in_use() -> int | None:
    """Bytes that this process has from malloc and has not given back; None where the C library does not say."""
    libc = _libc()
    if libc is None:
        return None
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def trim() -> None:
    """Give memory that is free in the heap back to the system, so that the resident set shows what is in use."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
