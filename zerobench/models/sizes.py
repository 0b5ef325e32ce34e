"""The models by name, and their sizes. No torch: the command line lists them.

Psi counts trainable elements. `examples` are those of one rank and micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

SIZES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    # Psi 23 443: not divisible by 2, 3 or 4, so that every padding shows.
    "mlp-tiny": ("mlp", {"inputs": 30, "width": 96, "depth": 3, "outputs": 19, "examples": 8}),
    # Two hidden matrices of 1 Mi elements: above the 2 M at which wire bytes are compared with the log.
    "mlp-2m": ("mlp", {"inputs": 64, "width": 1024, "depth": 3, "outputs": 16, "examples": 16}),
    "mlp-8m": ("mlp", {"inputs": 64, "width": 1024, "depth": 9, "outputs": 16, "examples": 16}),
    # Equal blocks of 4 160 elements: only the depth differs.
    "stack-4": ("stack", {"width": 64, "depth": 4, "examples": 4}),
    "stack-8": ("stack", {"width": 64, "depth": 8, "examples": 4}),
    "stack-32": ("stack", {"width": 64, "depth": 32, "examples": 4}),
    "gpt-tiny": ("gpt", {"vocabulary": 61, "width": 32, "heads": 4, "depth": 3, "context": 16, "examples": 4}),
    "gpt-small": ("gpt", {"vocabulary": 512, "width": 128, "heads": 4, "depth": 4, "context": 32, "examples": 4}),
    "gpt-8m": ("gpt", {"vocabulary": 512, "width": 288, "heads": 6, "depth": 8, "context": 32, "examples": 4}),
    "dyadic": ("dyadic", {}),
    "dyadic-tied": ("dyadic", {"tied": 1}),
    "dyadic-frozen": ("dyadic", {"frozen": 1}),
    "dyadic-unused": ("dyadic", {"unused": 1}),
}
"""name -> (family, sizes)."""
