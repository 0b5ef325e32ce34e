"""What memory holds, told by its content: no cooperation, no names, no Python objects of the subject.

A few windows of 4 consecutive values, spread over the memory, are looked up among all windows of known tensors
(weights, gradients, moments). Shards, views, flattened and cast copies keep most of their windows, whatever their
shape or place. Two values that agree to 2**-7, the unit of bf16, are taken for the same, so a weight and its fp32
master have the same look.

Not recognised: scaled or quantised copies, sums that are only partly reduced, and memory of a few values only.
Low-entropy content (small integers) fits anywhere, so a label also has to beat its own windows read backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WINDOW = 4
TOLERANCE = 2.0**-7
SAMPLED = 256  # places looked at
WINDOWS = 32  # of them used, where 4 consecutive values are neither zero nor all alike
FEWEST = 4  # windows without which nothing is said

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Fingerprints:
    """An index of `references`: full tensors by label ("weight", "gradient", ...). They are copied, 16 bytes an
    element."""

    def __init__(self, references: Mapping[str, Sequence[Tensor]]) -> None:
        self._index: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for label, tensors in references.items():
            flat = [t.detach().reshape(-1).to("cpu", torch.float32) for t in tensors]
            values = torch.cat(flat) if flat else torch.empty(0)
            ascending, places = values.sort()
            # The end is padded with what no value is near to, so that every place begins a window.
            padded = torch.cat([values, values.new_full((WINDOW - 1,), float("inf"))])
            self._index[label] = (padded, ascending, places)

    def tensors(self) -> list[Tensor]:
        """The index itself, for a ledger that should not count it."""
        return [tensor for row in self._index.values() for tensor in row]

    def label(self, memory: Tensor | torch.UntypedStorage) -> str | None:
        """The label that most windows of `memory` have, several joined by "|" where they cannot be told apart, or None.

        A storage and a uint8 tensor are raw bytes, read as each float dtype; any other tensor is read as what it is.
        """
        if isinstance(memory, torch.UntypedStorage):
            memory = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)  # type: ignore[call-overload]
        memory = memory.detach().reshape(-1)
        best, labels = 0.0, ""
        for values in _readings(memory):
            windows = _windows(values)
            if len(windows) < FEWEST:
                continue
            shares = {label: self._share(windows, label) for label in self._index}
            if max(shares.values(), default=0.0) > best:
                best = max(shares.values())
                labels = "|".join(label for label, share in shares.items() if share)
        return labels or None

    def _share(self, windows: Tensor, label: str) -> float:
        """The share of windows [k, 4] found under `label`; 0 unless it is a majority, and not by chance."""
        found = self._found(windows, label)
        if 2 * found <= len(windows) or 4 * self._found(windows.flip(1), label) >= found:
            return 0.0
        return found / len(windows)

    def _found(self, windows: Tensor, label: str) -> int:
        padded, ascending, places = self._index[label]
        slack = TOLERANCE * windows.abs()
        first, margin = windows[:, 0].contiguous(), slack[:, 0]
        low = torch.searchsorted(ascending, first - margin)
        high = torch.searchsorted(ascending, first + margin, right=True)
        counts = high - low
        rows = torch.repeat_interleave(torch.arange(len(windows)), counts)
        within = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        at = places[low[rows] + within]
        for j in range(1, WINDOW):
            near = (padded[at + j] - windows[rows, j]).abs() <= slack[rows, j]
            rows, at = rows[near], at[near]
        return len(set(rows.tolist()))


def _readings(memory: Tensor) -> list[Tensor]:
    if memory.dtype is not torch.uint8:
        return [memory] if memory.is_floating_point() else []
    readings = []
    for dtype in _FLOATS:
        whole = memory.numel() // dtype.itemsize * dtype.itemsize
        if whole and memory.storage_offset() % dtype.itemsize == 0:
            readings.append(memory[:whole].view(dtype))
    return readings


def _windows(values: Tensor) -> Tensor:
    """Up to WINDOWS windows [k, 4] in fp32, spread over `values`; those with a zero, or of one value only, say
    nothing."""
    last = values.numel() - WINDOW
    if last < 0:
        return torch.empty(0, WINDOW)
    starts = torch.linspace(0, last, min(SAMPLED, last + 1), dtype=torch.float64).long()
    places = starts[:, None] + torch.arange(WINDOW)
    windows = values[places.to(values.device)].float().cpu()
    telling = (windows.isfinite() & (windows != 0)).all(1) & (windows != windows[:, :1]).any(1)
    windows = windows[telling]
    return windows[:: -(-len(windows) // WINDOWS)] if len(windows) > WINDOWS else windows


def fingerprints_of(engine: Any) -> Fingerprints:
    """Of an engine that supports full_gradients and full_optimizer_state. Collective: every state is gathered once."""
    states = engine.full_optimizer_state().values()
    return Fingerprints(
        {
            "weight": list(engine.full_parameters().values()),
            "gradient": list(engine.full_gradients().values()),
            "first moment": [s["exp_avg"] for s in states if "exp_avg" in s],
            "second moment": [s["exp_avg_sq"] for s in states if "exp_avg_sq" in s],
        }
    )
