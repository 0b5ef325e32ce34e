"""The ledger: bytes alive on this rank, by what the engine claims of them, and what nobody claims.

It counts whole storages (`storages`), while a claim counts the bytes that its tensors show (`regions`): a small view
that keeps a large buffer alive leaves the rest of it unclaimed. It does not believe a claim: what is claimed must be
alive, and what is alive must be claimed. Current bytes are read at moments, the most within a phase as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zerobench.probes import allocator
from zerobench.probes.fingerprint import Fingerprints
from zerobench.probes.regions import Region, gaps, nbytes, plain, region, union
from zerobench.probes.storages import Entry, Role, Storages
from zerobench.probes.traffic import dtype_name
from zerobench.record import Holding, Peak, Piece
from zerobench.terms import Category, Moment

PIECES = 8
"""Most unclaimed pieces that a holding lists, the largest first."""


class Ledger:
    """A context manager, entered on the thread that drives the engine and before the engine is built; entered once.

    witness: bytes that the allocator of devices of type `where` has handed out, a count that does not come from here.
    peaks: one for each `phase` that has ended. witnessed: what the witness counted at the last `holding`, over the
    baseline, less what of the background has come since, and for what lies on other devices the ledger's own: comparable
    with the holding's `live`; None where the witness does not say. unknown: tensors that could not be counted; with any,
    nothing is proved.
    """

    def __init__(self, witness: Callable[[], int | None] = allocator.in_use, where: str = "cpu") -> None:
        self._witness, self._where = witness, where
        self.peaks: list[Peak] = []
        self._books = Storages(self._grown, self._matters)
        self._phase: tuple[int, str] | None = None
        self._top = (0, 0)  # (the subject's bytes, the backend's) at the subject's highest
        self._suspensions = 0
        self._witness_base: int | None = None
        self.witnessed: int | None = None

    def __enter__(self) -> Ledger:
        self._books.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._books.__exit__(*exc)

    # -- what counts ---------------------------------------------------------------------------------------------------

    def baseline(self) -> None:
        """From here on nothing that is alive now is counted; `adopt` brings back what the subject is given."""
        self._books.everything_is_background()
        in_use = self._witness()
        self._witness_base = None if in_use is None else in_use - self._background()

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors`, which are older than the ledger: the module that the engine is given."""
        self._books.assign(tensors, Role.COUNTED, "given")

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of `tensors`: batches, and what else is the suite's own."""
        self._books.assign(tensors, Role.BACKGROUND, "the suite's")

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While the suite reads, no peak is taken. What is made meanwhile and outlives it counts from then on, since
        it may be the subject's (a gather that it keeps): `ignore` what is the suite's."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1
            self._grown()

    @property
    def unknown(self) -> list[str]:
        return self._books.unknown

    # -- reading -------------------------------------------------------------------------------------------------------

    def live(self) -> int:
        """Bytes of the subject's storages that are alive now, the backend's temporaries left out. O(1)."""
        self._books.settle()
        return self._books.total[Role.COUNTED]

    def follow(self, changed: Callable[[Entry, int], None] | None) -> list[Entry]:
        """Call `changed` with each storage whose bytes change, from now on; None stops it. The entries alive now."""
        self._books.settle()
        self._books.changed = changed
        return [entry for entry, _ in self._books]

    def claimed(self, claims: Mapping[Category, Sequence[Tensor]]) -> Iterator[tuple[Category, Entry, int]]:
        """Each claimed storage that is in the books, with the bytes of it that a category's tensors show."""
        with _disable_current_modes():
            for category, tensors in claims.items():
                covered: dict[int, Region] = {}
                entries: dict[int, Entry] = {}
                for part in (part for tensor in tensors for part in _parts(tensor)):
                    entry = self._books.entry(part)
                    if entry is not None:
                        _cover(covered, part)
                        entries[part.untyped_storage()._cdata] = entry
                for key, entry in entries.items():
                    yield category, entry, nbytes(covered[key])

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Within it the subject's highest live bytes are kept; on leaving, `peaks` gets them. Raises RuntimeError if
        nested.

        The moment is the subject's own highest, so that `nbytes - backend` is its peak whatever the backend adds
        elsewhere.
        """
        if self._phase is not None:
            raise RuntimeError(f"phase {name!r} inside phase {self._phase[1]!r}")
        self._phase = (step, name)
        self._top = (-1, 0)
        self._books.settle()
        self._grown()
        try:
            yield
        finally:
            self._phase = None
            own, backend = self._top
            self.peaks.append(Peak(step, name, own + backend, backend))

    def _watched(self) -> bool:
        return self._phase is not None and not self._suspensions

    def _matters(self, more: int) -> bool:
        """Whether `more` bytes of the subject's would be its highest in this phase, by what the books say now."""
        return self._watched() and self._books.total[Role.COUNTED] + more > self._top[0]

    def _grown(self) -> None:
        own = self._books.total[Role.COUNTED]
        if own > self._top[0] and self._watched():
            self._top = (own, self._books.total[Role.BACKEND])

    def holding(
        self,
        step: int,
        moment: Moment,
        claims: Mapping[Category, Sequence[Tensor]],
        *,
        fingerprints: Fingerprints | None = None,
    ) -> Holding:
        """What is held now. claims: the engine's model states, by category; DTensors and sparse tensors are taken
        apart.

        A byte is claimed once, by the first category in the order of `Category` that shows it. A claimed storage that
        the ledger did not count is adopted. With `fingerprints` the pieces say what their content looks like. Raises
        TypeError for a claimed tensor of a layout that cannot be accounted for.
        """
        self._books.settle()
        in_use = self._witness()
        with _disable_current_modes():
            if fingerprints is not None:
                self.ignore(fingerprints.tensors())
            for tensors in claims.values():
                self._adopt_claimed(tensors)
            covered: dict[int, Region] = {}
            claimed: dict[str, int] = {}
            dtypes: dict[str, dict[str, int]] = {}
            scalars = 0
            for category in (c for c in Category if c in claims):
                by_dtype: dict[str, int] = {}
                for tensor in claims[category]:
                    for part in _parts(tensor):
                        fresh = _cover(covered, part)
                        if tensor.numel() == 1:
                            scalars += fresh
                        else:
                            name = dtype_name(part.dtype)
                            by_dtype[name] = by_dtype.get(name, 0) + fresh
                claimed[category.value] = sum(by_dtype.values())
                dtypes[category.value] = by_dtype
            unclaimed, pieces = self._unclaimed(covered, fingerprints)
        live = self.live()
        self.witnessed = None
        if in_use is not None and self._witness_base is not None and self._books.real:
            outside = self._books.outside(self._where, Role.COUNTED)
            self.witnessed = in_use - self._witness_base - self._background() + outside
        return Holding(
            step=step,
            moment=moment,
            claimed=claimed,
            live=live,
            unclaimed=unclaimed,
            scalars=scalars,
            pieces=pieces,
            dtypes=dtypes,
        )

    def _background(self) -> int:
        """What the witness counts and is not the subject's."""
        return self._books.total[Role.BACKGROUND] - self._books.outside(self._where, Role.BACKGROUND)

    def _adopt_claimed(self, tensors: Sequence[Tensor]) -> None:
        self._books.assign((part for tensor in tensors for part in _parts(tensor)), Role.COUNTED, "claimed")

    def _unclaimed(
        self, covered: Mapping[int, Region], fingerprints: Fingerprints | None
    ) -> tuple[int, tuple[Piece, ...]]:
        """Bytes of counted storages outside `covered`, and the largest pieces of them, a storage each."""
        found: list[tuple[int, Entry, torch.UntypedStorage, Region]] = []
        for entry, storage in self._books:
            if entry.role is Role.COUNTED:
                holes = gaps(covered.get(storage._cdata, []), entry.nbytes)
                if holes:
                    found.append((nbytes(holes), entry, storage, holes))
        found.sort(key=lambda row: (-row[0], row[1].by))
        pieces = tuple(
            Piece(size, entry.by, fingerprints.label(_bytes(storage, holes)) if fingerprints else None)
            for size, entry, storage, holes in found[:PIECES]
        )
        return sum(size for size, *_ in found), pieces


def with_labels(holding: Holding, labelled: Holding) -> Holding:
    """`holding`, with the labels that the same pieces got in `labelled`, taken a moment later."""
    labels = {(p.nbytes, p.by): p.looks_like for p in labelled.pieces}
    return replace(holding, pieces=tuple(replace(p, looks_like=labels.get((p.nbytes, p.by))) for p in holding.pieces))


def _parts(tensor: Tensor) -> list[Tensor]:
    """What a claimed tensor is made of and that has memory."""
    return [part for part in plain(tensor) if part.device.type != "meta"]


def _cover(covered: dict[int, Region], tensor: Tensor) -> int:
    """Add a strided tensor's bytes to what is covered of its storage; the number of them that are new."""
    key = tensor.untyped_storage()._cdata
    before = covered.get(key, [])
    after = covered[key] = union([*before, *region(tensor)])
    return nbytes(after) - nbytes(before)


def _bytes(storage: torch.UntypedStorage, holes: Region) -> Tensor:
    """The largest hole of a storage, as bytes."""
    start, stop = max(holes, key=lambda hole: hole[1] - hole[0])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (stop - start,))  # type: ignore
