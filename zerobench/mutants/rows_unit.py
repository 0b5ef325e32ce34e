"""When the weights of a unit are there: stage 3 of `rows`.

A unit's weights are gathered before its forward and freed after it; gathered again when the gradient of its output
arrives, and each freed as soon as its own gradient exists: every use of it has then been differentiated. A frozen
weight has no gradient to wait for: it is freed when the unit's inputs and its trainable weights have theirs. What
cannot be known before (unused weights) is freed when backward ends.

A weight that several units share belongs to none of them but to the root, which is gathered for the whole of forward:
each weight then travels once a pass, whoever shares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerobench.mutants.rows_parameter import Row


class Unit:
    """Weights that are gathered together. differentiating: set by the engine while backward runs."""

    def __init__(self, module: nn.Module, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.differentiating = False
        self._frozen = [row for row in rows if not row.trainable]
        self._missing = 0
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]
        for row in rows:
            if row.trainable:
                hook = row.parameter.register_post_accumulate_grad_hook(lambda _, row=row: self._used(row))  # type: ignore[no-untyped-call]
                self._handles.append(hook)

    def gather(self) -> None:
        """Collective: all weights of the unit, whole; waits for them."""
        works = [work for row in self.rows for work in row.gather()]
        for work in works:
            work.wait()

    def release(self) -> None:
        for row in self.rows:
            row.release()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gather()
        if self._frozen and not self.differentiating:
            inputs = [x for x in tensors((args, kwargs)) if x.requires_grad]
            self._missing = len(inputs) + len(self.rows) - len(self._frozen)
            for x in inputs:
                x.register_hook(lambda _: self._count())  # type: ignore[no-untyped-call]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.differentiating:
            return  # activations are being computed again: the backward that follows needs the weights
        self.release()
        for x in tensors(output):
            if x.requires_grad:
                x.register_hook(lambda _: self.gather())  # type: ignore[no-untyped-call]

    def _used(self, row: Row) -> None:
        row.release()
        self._count()

    def _count(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            for row in self._frozen:
                row.release()


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from tensors(branch)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))
