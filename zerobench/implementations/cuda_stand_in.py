"""A stand-in for CUDA on the CPU, for libraries that can be asked for no other device: what "shimmed" means.

Within `cuda_on_cpu()` a library finds a GPU: streams and events that do nothing, since on the CPU each operator is over
when it returns, tensors that say they are on CUDA where they are asked by `is_cuda` or `type()`, and factories that take
"cuda" for the CPU. Sharding, arithmetic and collectives are the library's own. What cannot be seen: whether streams are
in order, and whether memory is freed too early for a stream that still reads it; so no result of a shimmed
implementation is a verdict on its library.

A subclass of `torch.Tensor` may keep what it says of itself; `torch.cuda` is as it was after each call, and never
replaced while the suite's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SHIMMED = "CUDA is a stand-in on the CPU: its streams and events do nothing"
"""What an implementation that needs this says of itself, in its `shimmed`."""


class Stream:
    """A stream in which everything is over already. All streams are equal: there is one order of operators."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _stream(*args: Any, **kwargs: Any) -> Stream:
    return Stream()


_CUDA: Mapping[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "current_stream": _stream,
    "default_stream": _stream,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": _zero,
    "memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_allocated": _zero,
    "max_memory_reserved": _zero,
    "is_current_stream_capturing": lambda: False,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
}
"""What stands in torch.cuda meanwhile."""


def _on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device, as a name, a number or a torch.device; another device as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
        return torch.device("cpu")
    return device


def _cuda_type(tensor: Tensor, *args: Any) -> Any:
    """`Tensor.type()`, which names the CPU's types without a device."""
    return Tensor.type(tensor, *args) if args else Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`, which is torch.autograd's, by its other name: no mode answers for that one."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


class _Cuda(TorchFunctionMode):
    """Tensors and factories that speak of CUDA and mean the CPU."""

    _answers: Mapping[Any, Callable[..., Any]] = {
        Tensor.cuda: lambda tensor, *args, **kwargs: tensor,
        Tensor.cpu: lambda tensor, *args, **kwargs: tensor.clone(),  # a copy, as from a GPU: its source may be reused
        Tensor.is_cuda.__get__: lambda tensor, *args: True,  # type: ignore[attr-defined]
        Tensor.type: _cuda_type,
        Tensor.pin_memory: lambda tensor, *args, **kwargs: tensor,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:  # a mode is off in what it answers for, and so would be in all hooks of a backward
            with self:
                return _backward(*args, **(kwargs or {}))
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], (Tensor, torch.dtype)):
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within it torch.cuda is the stand-in, on this thread for tensors; for calls into the library, and no more."""
    # record_stream looks at what it is given before a mode is asked.
    with patch.multiple(torch.cuda, **_CUDA), patch.object(Tensor, "record_stream", _nothing), _Cuda():
        yield
