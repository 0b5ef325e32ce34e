"""Tensors without memory, and the few decisions that need a value all the same.

torch's fake tensors have shapes, dtypes, storages and autograd, and no bytes. Four things a trainer does need more:

1. It plans in whole numbers: parameter sizes that ranks compare, bucket order, meshes. Integer tensors that are made of
   no fake one are small and stay real.
2. It asks for a value (`item`, `bool`, `equal`). What torch itself still knows (a step count that began as a number)
   it is told. For the rest there is no true answer: it gets 1, or True, and that is written down in `faked`: the record
   is provisional, since the program may have taken another turn than it would. A real tensor into which a fake one has
   gone, or what other ranks would say, is unknown from then on, and so is all that is made of it.
3. It communicates: see `peers`.
4. torch chooses the attention kernel by the device, and a fake tensor's is none: asked instead is the CPU's own rule,
   since kernels differ in what they keep for backward.

The suite's own reading of a value (the loss, for its report) gets NaN, and decides nothing.

Bytes are those of the CPU's operators, with one difference that is known: torch's mean squared error on a CPU leaves its
loss, one element, in a storage as large as its input, and without memory in one of its own size.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import zerobench
from zerobench.models.model import Model
from zerobench.simulation import peers, planning


class Simulation:
    """A context manager: inside it new tensors have no memory. For one rank, on one thread and autograd's.

    faked: what was asked for and could not be known, a line a place in the program.
    """

    def __init__(self) -> None:
        # Real tensors that the subject kept from before are taken for fake ones of their shape.
        self._fake = _Fake(allow_non_fake_inputs=True)
        # The mode remembers each tensor that it makes by a weak reference, and torch refuses to convert a module
        # (`module.to`) whose parameters have any. What it would be remembered for is to meet the same tensor again.
        self._fake.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
        self._control = _Control(self._fake)
        self._stack = ExitStack()

    def __enter__(self) -> Simulation:
        # copy.deepcopy asks each parameter for its address.
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", module=r"torch\._tensor")
        self._stack.enter_context(planning.apart())
        self._stack.enter_context(self._fake)
        self._stack.enter_context(self._control)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def faked(self) -> tuple[str, ...]:
        return tuple(f"{what}, {times} times" if times > 1 else what for what, times in self._control.faked.items())

    def data(self, model: Model) -> Model:
        """`model` with examples that have the shapes of its own and no content."""
        with _disable_current_modes():
            example = model.example(0)

        def shapes(index: int) -> tuple[Tensor, ...]:
            return tuple(self._fake.from_tensor(tensor) for tensor in example)

        return replace(model, example=shapes)


class _Fake(FakeTensorMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its guard against compiling a mode costs a tenth of the time, and nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> _Fake:
        return self  # a copied tensor copies what it refers to, and its mode is among that


class _Control(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above the fake mode, beneath the ledger's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.faked: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # half of all calls
        kwargs = kwargs or {}
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor takes itself apart, and its local part comes by again
        given = list(_tensors((args, *kwargs.values())))
        if func.namespace == "c10d":
            out = peers.issued(func, args, kwargs)
            if "reduce" in func.__name__:
                _forget(t for t in given if not isinstance(t, FakeTensor))
            return out
        if not any(isinstance(t, FakeTensor) for t in given):
            return self._planned(func, args, kwargs, given)
        if func.namespace.startswith("_c10d_functional"):
            return peers.functional(func, args, kwargs)
        if func is torch.ops.aten._fused_sdp_choice.default:
            return _attention_kernel(func, args, kwargs)
        if (
            func.namespace == "aten"
            and isinstance(kwargs.get("out"), FakeTensor)
            and all(isinstance(t, FakeTensor) for t in given)
        ):
            # The fake mode has a slow way round for these; the kernel for tensors without memory checks shapes as well.
            with in_kernel_invocation_manager(self._fake):
                func(*args, **kwargs)
            return kwargs["out"]
        try:
            # The fake mode keeps the arguments of calls that it may see again: a storage (`set_`) would never be freed.
            storage = any(isinstance(a, torch.UntypedStorage) for a in args)
            with disable_fake_tensor_cache(self._fake) if storage else nullcontext():
                out = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._value(func, given[0])
        if func._schema.is_mutable and len(real := [t for t in _written(func, args, kwargs) if not _fake(t)]):
            _forget(real)
            return real[0] if isinstance(out, Tensor) else out
        return out

    def _planned(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """The result of an operator without a fake input: real, if it is made of whole numbers and gives such."""
        if given and (func is torch.ops.aten._local_scalar_dense.default or all(map(_whole, given))):
            unknown = any(map(_unknown, given))
            if unknown and not any(str(r.type).startswith("Tensor") for r in func._schema.returns):
                return self._value(func, given[0])
            with no_dispatch():
                out = func(*args, **kwargs)
            if unknown:
                _forget(_tensors(out))
            return out if all(map(_whole, _tensors(out))) else func(*args, **kwargs)
        out = func(*args, **kwargs)
        made = list(_tensors(out))
        if given or not made or not all(map(_whole, made)):
            return out
        with no_dispatch():
            return func(*args, **kwargs)

    def _value(self, func: Any, asked: Tensor) -> Any:
        file, line = _caller()
        if file.startswith(_SUITE):
            return float("nan")
        self.faked[f"{func} at {Path(file).name}:{line}"] += 1
        returns_bool = str(func._schema.returns[0].type) == "bool"
        return True if returns_bool or asked.dtype is torch.bool else 1.0 if asked.is_floating_point() else 1


def _attention_kernel(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's choice for tensors of these shapes. The rule reads shapes, dtypes and strides, no element."""
    with no_dispatch():
        return func(*(_stand_in(a) for a in args), **{k: _stand_in(v) for k, v in kwargs.items()})


def _stand_in(value: Any) -> Any:
    """A real tensor of this shape and dtype that has one row of memory; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape[-1], dtype=value.dtype).expand(value.shape)


def _fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator changes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(argument.name))


def _forget(tensors: Iterable[Tensor]) -> None:
    """Mark the values of real tensors, and of their views, as unknown."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), _MARK, True)


def _unknown(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), _MARK, False)


def _whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _caller() -> tuple[str, int]:
    """The innermost frame outside torch, the standard library, the probes and this package."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_SUBJECT) and not name.startswith("<"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown", 0


_MARK = "_zerobench_unknown"
_HOME = Path(zerobench.__file__).parent
_SUITE = (str(_HOME / "session.py"), str(_HOME / "worker.py"))
_NOT_THE_SUBJECT = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    str(_HOME / "simulation"),
    str(_HOME / "probes"),  # their modes stand between the subject and the operator
)
