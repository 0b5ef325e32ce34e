"""What happens to storages, told to the books: operators by a dispatch mode, and two events that are no operators by
hooks.

`UntypedStorage.resize_` frees memory without an operator, and `Work.wait` ends a collective. Both are followed at the
class, so that every thread and every reference to the class is covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from zerobench.probes.storages import Storages


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the books what each operator returns, at some 13 us an operator: five times as long a step of a tiny
    model, no visible change of one whose matrices are 768 wide. Never timed."""

    def __init__(self, books: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._books = books
        self._kinds: dict[Any, tuple[bool, bool]] = {}  # by operator: returns an alias, changes what it does not return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd asks for it all the time, and it makes nothing
        if types and any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        kind = self._kinds.get(func)
        if kind is None:
            returns = func._schema.returns
            aliased = any(r.alias_info is not None for r in returns)
            kind = self._kinds[func] = (aliased, func._schema.is_mutable and not aliased)
        aliased, changes = kind
        if type(out) is Tensor:
            self._books.shown(out, func, aliased)
        elif out is not None:
            for tensor in _tensors(out):
                self._books.shown(tensor, func, aliased)
        if changes:
            for tensor in _tensors(args):
                self._books.shown(tensor, func, True)
        if func.namespace == "c10d":
            self._books.handed(_tensors(args))
            if func in _REDUCE_SCATTERS:
                self._books.reduce_scattered(_tensors(args[1]))
        elif func.namespace == "_c10d_functional":
            self._books.handed(_tensors(args))
            self._books.waited()
        return out


_DEVICE = torch.ops.prim.device.default
_REDUCE_SCATTERS: set[Any] = set()
if torch.distributed.is_available():
    _REDUCE_SCATTERS |= {
        torch.ops.c10d._reduce_scatter_base_.default,
        torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


# -- what is no operator -----------------------------------------------------------------------------------------------

_hooked: list[Storages] = []
_undo: list[Callable[[], None]] = []


def hook(books: Storages) -> None:
    """Tell `books` of both events, until `unhook`."""
    _hooked.append(books)
    if len(_hooked) > 1:
        return

    def after_resize(storage: torch.UntypedStorage) -> None:
        for books in _hooked:
            books.resized(storage)

    def after_wait(_: Any) -> None:
        for books in _hooked:
            books.waited()

    _undo.append(_follow(torch.UntypedStorage, "resize_", after_resize))
    if torch.distributed.is_available():
        _undo.append(_follow(torch.distributed.Work, "wait", after_wait))


def unhook(books: Storages) -> None:
    """The classes are as they were once nobody listens."""
    _hooked.remove(books)
    while _undo and not _hooked:
        _undo.pop()()


def _follow(cls: type, name: str, then: Callable[[Any], None]) -> Callable[[], None]:
    """Call `then(self)` after each call of a method; returns what puts the class back as it was."""
    own, inherited = vars(cls).get(name), getattr(cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inherited(self, *args, **kwargs)
        then(self)
        return result

    setattr(cls, name, method)
    return lambda: delattr(cls, name) if own is None else setattr(cls, name, own)
