"""A waterfall: rows of bytes whose sum is what was measured, the last of them what no other accounts for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any


class Kind(Enum):
    """What kind of word a row is.

    LAW: the paper's. CLAIM: follows from what the implementation claims. MEASURED: read from the record as it is. BOUND:
    bytes that are there, up to what the claims allow for this purpose; that they serve it, no record says. SURPLUS:
    bytes that have a name and that nobody claims or allows. UNEXPLAINED: the rest.
    """

    LAW = "law"
    CLAIM = "claim"
    MEASURED = "measured"
    BOUND = "bound"
    SURPLUS = "surplus"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Row:
    """name: what the bytes are. nbytes: signed. why: where the number is from, one sentence."""

    name: str
    nbytes: int
    kind: Kind
    why: str


@dataclass(frozen=True)
class Waterfall:
    """Why `rank`, the one that holds the most, holds `total` bytes at a moment.

    run: the id of the record. moment: "at rest" or "at the peak". what: what `total` is, and by which field. rows: the
    paper's formula first, the unexplained rest last; they sum to `total`. absent: steps that this record has no evidence
    for, a sentence each. outer: whether the whole is counted by an allocator or the system, not by the ledger.
    """

    case: str
    run: str
    moment: str
    rank: int
    psi: int
    n: int
    what: str
    total: int
    rows: tuple[Row, ...]
    absent: tuple[str, ...] = ()
    outer: bool = False

    def __post_init__(self) -> None:
        if sum(row.nbytes for row in self.rows) != self.total:
            raise ValueError(f"{self.run}: rows come to {sum(r.nbytes for r in self.rows)}, not to {self.total}")

    @property
    def unexplained(self) -> int:
        return self.rows[-1].nbytes

    @property
    def surplus(self) -> int:
        """Bytes that have a name and that nobody claims or allows."""
        return sum(row.nbytes for row in self.rows if row.kind is Kind.SURPLUS)

    @property
    def share(self) -> Fraction:
        """The score: the unexplained rest, of the whole; 0 is best."""
        return Fraction(abs(self.unexplained), self.total) if self.total else Fraction(0)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "run": self.run,
            "moment": self.moment,
            "rank": self.rank,
            "psi": self.psi,
            "n": self.n,
            "what": self.what,
            "total_nbytes": self.total,
            "rows": [
                {"name": r.name, "nbytes": r.nbytes, "psi": r.nbytes / self.psi, "kind": r.kind.value, "why": r.why}
                for r in self.rows
            ],
            "unexplained_nbytes": self.unexplained,
            "unexplained_share": float(self.share),
            "surplus_nbytes": self.surplus,
            "absent": list(self.absent),
        }


class Steps:
    """Rows as they are found. A row of no bytes is left out; one that only an allowance explains takes no more than is
    there."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.absent: list[str] = []
        self.leads: list[str] = []  # what is known of bytes that stay unexplained

    @property
    def sum(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def add(self, name: str, nbytes: int, kind: Kind, why: str) -> None:
        if nbytes:
            self.rows.append(Row(name, nbytes, kind, why))

    def within(self, name: str, allowed: int, up_to: int, why: str) -> None:
        """A BOUND row: what is still missing to `up_to`, at most `allowed`."""
        self.add(name, max(0, min(allowed, up_to - self.sum)), Kind.BOUND, why)

    def close(self, total: int) -> tuple[Row, ...]:
        """All rows, and the rest."""
        why = "no step accounts for it" if total != self.sum else "nothing is left"
        if total < self.sum:
            why = "less than the steps come to: not all that was alive before, or in the bare model, was alive at once"
        why += f"; of it {'; '.join(self.leads)}" if self.leads and total > self.sum else ""
        return (*self.rows, Row("unexplained", total - self.sum, Kind.UNEXPLAINED, why))
