"""What a page is made of, as its template takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerobench.finding import Finding
from zerobench.report.pen import Drawing


@dataclass(frozen=True)
class Chart:
    """A chart and its numbers. head, rows: the table; the first column names the row."""

    title: str
    note: str
    svg: Drawing
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """Charts of one kind, or a sentence on why there are none."""

    key: str
    title: str
    about: str
    charts: tuple[Chart, ...] = ()
    why_not: str = ""
    legend: tuple[tuple[str, str], ...] = ()  # words, and the class of their colour
    left_out: str = ""


@dataclass(frozen=True)
class Shown:
    """A finding with what the page says of it."""

    finding: Finding
    command: str
    verdicts: str
    anchor: str = ""


@dataclass
class Group:
    """What passed of one check."""

    check: str
    requirement: str
    level: str
    shown: list[Shown] = field(default_factory=list)
    left_out: int = 0
