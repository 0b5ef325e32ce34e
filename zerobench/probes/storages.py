"""Every storage that is alive: who made it and how large it is now. The ledger's books.

A dispatch mode sees the outputs of each operator on its thread, and on autograd's threads for that thread's backward.
Storages are held weakly: torch keeps a storage's Python object as long as the storage itself, so the weak reference's
callback fires exactly when the memory is given back, also for a storage that only C++ owns (a DDP bucket, a tensor
saved for backward). Five things would make a count wrong:

1. A mode that answers for a DTensor hides the operators on its local tensor: wrapper types are sent on.
2. A wrapper subclass has a storage of its own, without memory: not counted, its parts are.
3. `UntypedStorage.resize_` is no operator, and FSDP frees by it: hooked at the class, for all threads.
4. A storage may be older than the books, or made where no mode sees it (another thread, inside a kernel, from numpy).
   It enters them when an operator first shows it, as an alias that was not there before.
5. The gloo backend makes a reduce-scatter of one tensor from a copy of the input (an all-reduce of all of it), which
   comes to light, by rule 4, when the result is split: it is the backend's, not the subject's. No other temporary of
   gloo is made where a mode can see it (all-gather's as large a one is not), nor any that a kernel makes inside
   itself.

And one would make it noisy: gloo's threads let go of a collective's tensors a little after `Work.wait` has returned,
once they get a core and the interpreter's lock. So after a wait, before a count is believed, they get time to
(`settle`).
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from zerobench.probes.regions import plain
from zerobench.probes.threads import others_are_ready
from zerobench.probes.watch import Watch, hook, unhook

SETTLE_S = 0.005
"""Wait for a backend to let go. It takes some 0.1 ms where a core is free."""

LONGEST_SETTLE_S = 0.2
"""The same while another thread of the process is ready to run: on a busy machine it may be the backend's, without a
core."""


class Role(Enum):
    COUNTED = "counted"  # the subject's
    BACKGROUND = "background"  # alive at the baseline, or the suite's
    BACKEND = "backend"  # a temporary of the communication backend


class Entry:
    """One live storage. op, code, line: the operator that made it, and the subject's line that called it, if any."""

    __slots__ = ("code", "line", "nbytes", "op", "ref", "role", "settled", "where")

    def __init__(self, nbytes: int, role: Role, op: object, code: CodeType | None, line: int, where: str) -> None:
        self.nbytes, self.role, self.op, self.code, self.line = nbytes, role, op, code, line
        self.where = where  # the type of its device, "cpu" or "cuda"
        self.settled = 0
        self.ref: _Ref

    @property
    def by(self) -> str:
        """ "aten.empty.memory_format at zero.py:88"."""
        return f"{self.op} at {Path(self.code.co_filename).name}:{self.line}" if self.code else str(self.op)


class _Ref(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key",)
    key: int


class Storages:
    """The books. `total` bytes by role, kept as storages come, go and change.

    grown: called after each increase. matters: whether one by so many bytes would, so that it is worth to settle before.
    """

    def __init__(self, grown: Callable[[], None], matters: Callable[[int], bool]) -> None:
        self.total = dict.fromkeys(Role, 0)
        self.unknown: list[str] = []  # what could not be counted
        self.real = True  # whether storages in the books have memory: under a fake mode they have none
        self._entries: dict[int, Entry] = {}
        self._lock = threading.RLock()  # callbacks of weak references run on whichever thread frees
        self._grown, self._matters = grown, matters
        self._copies: deque[int] = deque(maxlen=64)  # sizes of reduce-scatters whose copy has not come to light
        self._handed: set[int] = set()  # storages given to a collective, which its backend may still hold
        self._waited = False  # whether a collective has ended since the last `settle`
        self._mode = Watch(self)
        self._skipped: dict[str, bool] = {}
        self.changed: Callable[[Entry, int], None] | None = None  # told of each storage's new bytes, 0 as it is freed

    def __enter__(self) -> Storages:
        self.real = detect_fake_mode() is None
        hook(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        self._mode.__exit__(*exc)  # type: ignore[no-untyped-call]
        unhook(self)

    def __iter__(self) -> Iterator[tuple[Entry, torch.UntypedStorage]]:
        """The storages alive now."""
        for entry in list(self._entries.values()):
            storage = entry.ref()
            if storage is not None:
                yield entry, storage

    def assign(self, tensors: Iterable[Tensor], role: Role, op: str) -> None:
        """Put the storages of `tensors` under `role`; one that is not in the books yet is entered as made by `op`."""
        for tensor in tensors:
            for part in plain(tensor):
                entry = self.entry(part)
                if entry is None:
                    self._enter(part, role, op, None, 0)
                elif entry.role is not role:
                    with self._lock:
                        self.total[entry.role] -= entry.nbytes
                        self.total[role] += entry.nbytes
                        entry.role = role

    def entry(self, tensor: Tensor) -> Entry | None:
        """The entry of a strided tensor's storage."""
        return self._entries.get(tensor.untyped_storage()._cdata)

    def outside(self, where: str, role: Role) -> int:
        """Bytes under `role` that do not lie on a device of type `where`."""
        with self._lock:
            return sum(e.nbytes for e in self._entries.values() if e.role is role and e.where != where)

    def everything_is_background(self) -> None:
        """All that is in the books, and the storage of every tensor that Python knows of, was there before."""
        found = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
        self.assign((t for t in found if _has_memory(t)), Role.BACKGROUND, "made before")
        with self._lock:
            for entry in self._entries.values():
                entry.role = Role.BACKGROUND
            self.total = dict.fromkeys(Role, 0) | {Role.BACKGROUND: sum(e.nbytes for e in self._entries.values())}

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self._resize(entry, storage.nbytes())

    def waited(self) -> None:
        self._waited = True

    def settle(self) -> None:
        """After a collective has ended, wait a moment for its backend to let go of what only the backend still holds.

        SETTLE_S, and again as long as another thread is ready to run, at most LONGEST_SETTLE_S; nothing where no
        collective has ended. A storage that has survived it is the subject's.
        """
        if not self._waited:
            return
        self._waited = False
        now = time.perf_counter()
        until, last = now + SETTLE_S, now + LONGEST_SETTLE_S
        while self._handed:
            if (now := time.perf_counter()) >= until:
                if now >= last or not others_are_ready():
                    break
                until = now + SETTLE_S
            time.sleep(2e-5)  # lets go of the interpreter's lock
        for key in list(self._handed):
            entry = self._entries.get(key)
            if entry is not None:
                entry.settled += 1
            if entry is None or entry.settled > 1:
                self._handed.discard(key)

    # -- what the mode reports -----------------------------------------------------------------------------------------

    def shown(self, tensor: Tensor, func: Any, aliased: bool) -> None:
        """`tensor` is an output of `func` (or an argument that it changes); aliased: func may return what it was
        given."""
        if not _has_memory(tensor) or (self.real and isinstance(tensor, FakeTensor)):
            return  # DTensor plans with fake tensors beside real ones: they are nobody's memory
        try:
            parts = plain(tensor)
        except TypeError as error:
            self.unknown.append(f"{func}: {error}")
            return
        for part in parts:
            storage = part.untyped_storage()
            entry = self._entries.get(storage._cdata)
            if entry is None:
                role = Role.BACKEND if aliased and self._is_copy(func, storage.nbytes()) else Role.COUNTED
                code, line = self._caller()
                self._enter(part, role, f"{func} (made unseen)" if aliased else func, code, line)
            elif entry.nbytes != storage.nbytes():
                self._resize(entry, storage.nbytes())

    def handed(self, tensors: Iterable[Tensor]) -> None:
        """`tensors` go to a collective."""
        for tensor in tensors if self.real else ():  # without memory there is no backend that could hold them
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                entry = self._entries.get(key)
                if entry is not None and entry.settled < 2:
                    self._handed.add(key)

    def reduce_scattered(self, tensors: Iterable[Tensor]) -> None:
        self._copies.extend(t.numel() * t.itemsize for t in tensors)

    def _is_copy(self, func: Any, nbytes: int) -> bool:
        if func is torch.ops.aten.split.Tensor and nbytes in self._copies:
            self._copies.remove(nbytes)
            return True
        return False

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _enter(self, tensor: Tensor, role: Role, op: object, code: CodeType | None, line: int) -> None:
        storage = tensor.untyped_storage()
        entry = Entry(storage.nbytes(), role, op, code, line, tensor.device.type)
        entry.ref = _Ref(storage, self._freed)
        entry.ref.key = storage._cdata
        if role is Role.COUNTED and self._matters(entry.nbytes):
            self.settle()
        with self._lock:
            self._entries[entry.ref.key] = entry
            self.total[role] += entry.nbytes
            if self.changed is not None:
                self.changed(entry, entry.nbytes)
            self._grown()

    def _resize(self, entry: Entry, nbytes: int) -> None:
        with self._lock:
            self.total[entry.role] += nbytes - entry.nbytes
            entry.nbytes = nbytes
            if self.changed is not None:
                self.changed(entry, nbytes)
            self._grown()

    def _freed(self, ref: Any) -> None:
        with self._lock:
            entry = self._entries.get(ref.key)
            if entry is not None and entry.ref is ref:
                del self._entries[ref.key]
                self._handed.discard(ref.key)
                self.total[entry.role] -= entry.nbytes
                if self.changed is not None:
                    self.changed(entry, 0)

    def _caller(self) -> tuple[CodeType | None, int]:
        """The innermost Python frame outside torch, the standard library and the probes."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            skipped = self._skipped.get(name)
            if skipped is None:
                skipped = self._skipped[name] = name.startswith(_NOT_THE_SUBJECT) or name.startswith("<")
            if not skipped:
                return frame.f_code, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return None, 0


_NOT_THE_SUBJECT = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sysconfig.get_path("stdlib"),
)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's bytes exist (or would, under fake tensors): not on the meta device, not an opaque wrapper."""
    if tensor.device.type == "meta":
        return False
    if type(tensor) in (Tensor, torch.nn.Parameter) or isinstance(tensor, FakeTensor):
        return True
    if hasattr(type(tensor), "__tensor_flatten__") or tensor.layout is not torch.strided:
        return True
    # A subclass that only looks like a tensor was made without memory.
    storage = tensor.untyped_storage()
    return storage.nbytes() == 0 or storage.data_ptr() != 0
