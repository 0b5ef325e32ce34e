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
    "mlp-4m": ("mlp", {"inputs": 64, "width": 1024, "depth": 5, "outputs": 16, "examples": 16}),
    "mlp-8m": ("mlp", {"inputs": 64, "width": 1024, "depth": 9, "outputs": 16, "examples": 16}),
    # Equal blocks of 4 160 elements: only the depth differs.
    "stack-4": ("stack", {"width": 64, "depth": 4, "examples": 4}),
    "stack-8": ("stack", {"width": 64, "depth": 8, "examples": 4}),
    "stack-32": ("stack", {"width": 64, "depth": 32, "examples": 4}),
    "gpt-tiny": ("gpt", {"vocabulary": 61, "width": 32, "heads": 4, "depth": 3, "context": 16, "examples": 4}),
    # The same weights and data, with activations computed again in backward.
    "gpt-tiny-checkpointed": (
        "gpt",
        {"vocabulary": 61, "width": 32, "heads": 4, "depth": 3, "context": 16, "examples": 4, "checkpointed": 1},
    ),
    "gpt-small": ("gpt", {"vocabulary": 512, "width": 128, "heads": 4, "depth": 4, "context": 32, "examples": 4}),
    "gpt-8m": ("gpt", {"vocabulary": 512, "width": 288, "heads": 6, "depth": 8, "context": 32, "examples": 4}),
    # For GPUs: hidden matrices of 64 Mi elements, and a decoder of GPT-2's smallest shape with an untied head.
    "mlp-134m": ("mlp", {"inputs": 64, "width": 8192, "depth": 3, "outputs": 16, "examples": 16}),
    "mlp-268m": ("mlp", {"inputs": 64, "width": 8192, "depth": 5, "outputs": 16, "examples": 16}),
    "mlp-537m": ("mlp", {"inputs": 64, "width": 8192, "depth": 9, "outputs": 16, "examples": 16}),
    "gpt-162m": (
        "gpt",
        {"vocabulary": 50304, "width": 768, "heads": 12, "depth": 12, "context": 512, "examples": 4},
    ),
    # The sizes of Table 1 of the ZeRO paper, to be simulated: Psi 7 504 338 944, 127 995 371 520 and 999 998 668 800.
    # Vocabularies fill up to what the printed digits allow; 1 024 ranks divide every tensor. Wide and not deep, since a
    # simulation's cost is its depth's.
    "gpt-7500m": (
        "gpt",
        {"vocabulary": 30592, "width": 4096, "heads": 32, "depth": 36, "context": 1024, "examples": 1},
    ),
    "gpt-128b": (
        "gpt",
        {"vocabulary": 52224, "width": 20480, "heads": 160, "depth": 25, "context": 1024, "examples": 1},
    ),
    "gpt-1t": (
        "gpt",
        {"vocabulary": 163968, "width": 40960, "heads": 320, "depth": 49, "context": 1024, "examples": 1},
    ),
    "dyadic": ("dyadic", {}),
    "dyadic-tied": ("dyadic", {"tied": 1}),
    "dyadic-frozen": ("dyadic", {"frozen": 1}),
    "dyadic-unused": ("dyadic", {"unused": 1}),
    "dyadic-buffers": ("dyadic", {"buffers": 1}),
    # Sizes 1, n - 1, n, n + 1 for n up to 4, and 15, 16, 17 around a bucket of 16; Psi 63.
    "shapes": (
        "edges",
        {
            "0.one": 1,
            "0.two": 2,
            "0.three": 3,
            "0.four": 4,
            "1.five": 5,
            "1.below": 15,
            "1.bucket": 16,
            "rest.above": 17,
        },
    ),
    # All but three elements in one tensor; Psi 1024.
    "giant": ("edges", {"0.tiny": 1, "1.giant": 1021, "rest.tiny": 2}),
    # Psi 3: fewer than ranks at n = 4.
    "tinier": ("edges", {"0.tiny": 1, "1.tiny": 1, "rest.tiny": 1}),
}
"""name -> (family, sizes)."""
