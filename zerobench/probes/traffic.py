"""Every collective that this process issues, seen at the dispatcher.

A Python kernel on each `c10d::*` operator at dispatch key BackendSelect sees whatever goes through a ProcessGroup: the
C++ reducer of DDP, FSDP, functional and coalesced collectives, hooks, and calls from any thread. A collective counts
once, where it is lowered to `c10d`. It patches nothing that a subject can hold a reference to, and it is below autograd
and dispatch modes. Not seen: calls on a `Backend` itself, and traffic that is not torch's; the wire (`wire`) is the
witness for those. A call that the table below does not know is remembered in `Tap.unknown`, never counted as nothing.

What is counted is the full tensor of each call (`record.Call.numel`): a list is summed, and a coalesced call becomes
one `Call` for each dtype among its tensors. The kernels are private API of torch, so `Tap.self_test` proves them in
each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobench.probes.tapcheck import self_test
from zerobench.record import Call
from zerobench.terms import Collective

_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """zerobench's word for a dtype (`terms.DTYPE_NBYTES`); torch's own, as "int64", for one that no recipe names."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Row:
    """How one operator is counted. payload: the argument that is the full tensor, or all of its pieces. root: the
    argument with the group rank of the root or the peer. shared: the payload is one rank's share, 1/n of the full
    tensor."""

    kind: Collective
    payload: str | None
    root: str | None = None
    shared: bool = False
    received: str | None = None  # the argument that lists what each rank gives to this one, where shares may differ


_K = Collective
_ROWS = {
    "allreduce_": _Row(_K.ALL_REDUCE, "tensors"),
    "allreduce_coalesced_": _Row(_K.ALL_REDUCE, "tensors"),
    "_reduce_scatter_base_": _Row(_K.REDUCE_SCATTER, "input_tensor"),
    "reduce_scatter_": _Row(_K.REDUCE_SCATTER, "input_tensors"),
    "reduce_scatter_tensor_coalesced_": _Row(_K.REDUCE_SCATTER, "inputs"),
    "_allgather_base_": _Row(_K.ALL_GATHER, "output_tensor"),
    "allgather_": _Row(_K.ALL_GATHER, "output_tensors", received="output_tensors"),
    "allgather_coalesced_": _Row(_K.ALL_GATHER, "output_lists"),
    "allgather_into_tensor_coalesced_": _Row(_K.ALL_GATHER, "outputs"),
    "alltoall_base_": _Row(_K.ALL_TO_ALL, "input", received="output"),
    "alltoall_": _Row(_K.ALL_TO_ALL, "input_tensors", received="output_tensors"),
    "reduce_": _Row(_K.REDUCE, "tensors", root="root_rank"),
    "broadcast_": _Row(_K.BROADCAST, "tensors", root="root_rank"),
    "gather_": _Row(_K.GATHER, "input_tensors", root="root_rank", shared=True),
    "scatter_": _Row(_K.SCATTER, "output_tensors", root="root_rank", shared=True),
    "send": _Row(_K.SEND, "tensors", root="dst"),
    "recv_": _Row(_K.RECV, "tensors", root="src"),
    "recv_any_source_": _Row(_K.RECV, "tensors"),
    "barrier": _Row(_K.BARRIER, None),
    "monitored_barrier_": _Row(_K.BARRIER, None),
}
_SILENT = frozenset({"check_for_nan"})  # operators of the namespace that send nothing
_UNCOUNTED = "symm_mem"  # operators that communicate without c10d: refused, not counted

_installed: Tap | None = None


class Tap:
    """The log of collectives of this process. `install` before the process group exists; one tap a process at a time.

    step, phase: set by whoever drives the run; stamped on each call. calls: in order of issue, those of all threads.
    unknown: what was called and could not be counted; a run with any is invalid. on_call: called with each `Call`
    before it is issued, on the issuing thread, so that a black box knows what a hanging rank was waiting for. around:
    issues a collective, for whoever wants to know how long that takes.
    """

    def __init__(self) -> None:
        self.step = -1
        self.phase = "build"
        self.calls: list[Call] = []
        self.unknown: list[str] = []
        self.on_call: Callable[[Call], None] | None = None
        self.around: Callable[[list[Call], Callable[[], Any]], Any] | None = None
        self._reading = 0
        self._libraries: list[torch.library.Library] = []
        self._tapped: set[str] = set()
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple a group, however many calls name it

    def install(self) -> None:
        """Put the kernels in place. Raises RuntimeError where this torch has not what they need."""
        global _installed
        if _installed is not None:
            raise RuntimeError("a Tap is already installed in this process; uninstall it first")
        if not dist.is_available():
            raise RuntimeError("this torch is built without torch.distributed: there are no collectives to tap")
        try:
            below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        except AttributeError as error:
            raise RuntimeError(f"torch {torch.__version__} cannot be tapped at BackendSelect: {error}") from None
        names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
        for space in ("c10d", _UNCOUNTED):
            # The kernels live as long as the Library object.
            library = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]
            self._libraries.append(library)
            for name in sorted(n for n in names if n.startswith(space + "::")):
                for schema in torch._C._jit_get_schemas_for_operator(name):
                    self._tap(library, space, schema, below)
        _installed = self

    def _tap(self, library: torch.library.Library, space: str, schema: Any, below: Any) -> None:
        name = schema.name.split("::")[1]
        if name in _SILENT:
            return
        arguments = {a.name: i for i, a in enumerate(schema.arguments)}
        row = _ROWS.get(name) if space == "c10d" else None
        if row is not None and (missing := {row.payload, row.root, row.received, "process_group"} - {None, *arguments}):
            raise RuntimeError(f"torch {torch.__version__}: c10d::{name} has no argument {sorted(map(str, missing))}")
        op = getattr(getattr(torch.ops, space), name)
        op = getattr(op, schema.overload_name or "default")

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._see(space, name, row, arguments, args, kwargs)
            if self.around is not None:
                return self.around(calls, lambda: op.redispatch(keyset & below, *args, **kwargs))
            return op.redispatch(keyset & below, *args, **kwargs)

        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        library.impl(full, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        self._tapped.add(f"{space}::{full}")

    def uninstall(self) -> None:
        """Take the kernels away again."""
        global _installed
        for library in self._libraries:
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries.clear()
        self._tapped.clear()
        if _installed is self:
            _installed = None

    def untapped(self) -> list[str]:
        """Operators of `c10d` that have appeared since `install`, and that the tap would not see."""
        silent = {f"c10d::{name}" for name in _SILENT}
        present = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
        return sorted(present - self._tapped - silent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The suite's own collectives: calls of any thread are recorded under phase "read" meanwhile."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def self_test(self, device: torch.device | str) -> list[str]:
        """Issue one tiny collective of each kind and compare with what was counted. Collective; leaves `calls` as it
        was.

        Returns what is wrong, one sentence each; empty when kind, elements, dtype and group of all are right. A kind
        that the backend refuses is left out. Some 4 ms on one rank, 25 ms on two that share two busy cores.
        """
        return self_test(self, torch.device(device))

    def _see(
        self, space: str, name: str, row: _Row | None, arguments: dict[str, int], args: Any, kwargs: Any
    ) -> list[Call]:
        if row is None:
            self.unknown.append(f"{space}::{name} is not known to zerobench: what it sends is not counted")
            return []

        def given(argument: str) -> Any:
            position = arguments[argument]
            return args[position] if position < len(args) else kwargs.get(argument)

        try:
            calls = self._calls(name, row, given)
        except Exception as error:
            # The subject's call goes on; the run is invalid, and says why.
            self.unknown.append(f"c10d::{name} could not be counted: {type(error).__name__}: {error}")
            return []
        for call in calls:
            self.calls.append(call)
            if self.on_call is not None:
                self.on_call(call)
        return calls

    def _calls(self, name: str, row: _Row, given: Callable[[str], Any]) -> list[Call]:
        pg = dist.ProcessGroup.unbox(given("process_group"))
        group = group_ranks(pg)
        group = self._groups.setdefault(group, group)
        communicator = group_name(pg)
        n = len(group)
        root = None
        if row.root is not None:
            root = group[int(given(row.root))]
        tensors = list(_flat(given(row.payload))) if row.payload else []
        if any(t.layout is not torch.strided for t in tensors):
            raise TypeError("a sparse tensor: its values and indices travel below c10d")
        numels: dict[torch.dtype, int] = {}
        for tensor in tensors:
            numels[tensor.dtype] = numels.get(tensor.dtype, 0) + tensor.numel() * (n if row.shared else 1)
        received = _received(given, row, pg.rank()) if row.received and len(numels) == 1 else None
        thread = threading.current_thread()
        by = "main" if thread is threading.main_thread() else thread.name
        phase = "read" if self._reading else self.phase
        calls = []
        for dtype, numel in numels.items():
            uneven = received is not None and received * n != numel * (n - 1)
            calls.append(
                Call(
                    step=self.step,
                    phase=phase,
                    kind=row.kind,
                    numel=numel,
                    nbytes=numel * dtype.itemsize,
                    dtype=dtype_name(dtype),
                    group=group,
                    root=root,
                    op=name,
                    by=by,
                    received_numel=received if uneven else None,
                    communicator=communicator,
                )
            )
        return calls or [Call(self.step, phase, row.kind, 0, 0, "", group, root, name, by, communicator=communicator)]


def group_ranks(pg: dist.ProcessGroup) -> tuple[int, ...]:
    """The members of a group by global rank, in the group's own order; -1 each where torch does not know them.

    A group made by hand, or one that is still being made, is not in torch's tables; one as large as the world is the
    world.
    """
    try:
        order = dist.distributed_c10d._world.pg_group_ranks[pg]
        return tuple(sorted(order, key=order.__getitem__))
    except (KeyError, AttributeError):
        n = pg.size()
        world = dist.get_world_size() if dist.is_initialized() else n
        return tuple(range(n)) if n == world else (-1,) * n


def group_name(pg: dist.ProcessGroup) -> str:
    """What torch calls a group; its members rendezvous under that name, so that it is the same on all of them. "" for
    the default group and for one that torch does not know."""
    try:
        return "" if pg == dist.group.WORLD else str(dist.distributed_c10d._world.pg_names[pg])
    except (KeyError, AttributeError):
        return ""


def _received(given: Callable[[str], Any], row: _Row, rank: int) -> int:
    """Elements that come from other ranks: all that is put out, less what this rank gives to itself."""
    assert row.received is not None
    out = given(row.received)
    if isinstance(out, Tensor):  # alltoall_base_: splits along dimension 0; none means even ones
        splits = given("output_split_sizes")
        n = dist.ProcessGroup.unbox(given("process_group")).size()
        own = out.numel() // n if not splits else splits[rank] * (out.numel() // max(out.shape[0], 1))
        return int(out.numel() - own)
    pieces = out[0] if isinstance(out[0], (list, tuple)) else out
    return int(sum(t.numel() for t in pieces) - pieces[rank].numel())


def _flat(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _flat(item)
