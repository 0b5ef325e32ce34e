"""A prediction as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from zerobench.predict import Row
from zerobench.recipes import Preset
from zerobench.report.text import table
from zerobench.terms import MODEL_STATES, Category, Collective, Stage
from zerobench.units import count_text, nbytes_text, seconds_text

NAMES = {Stage.DDP: "DDP", Stage.OPTIMIZER: "stage 1", Stage.GRADIENT: "stage 2", Stage.PARAMETER: "stage 3"}


@dataclass(frozen=True)
class Question:
    """What was asked: Psi, n, the recipe with its changed dtypes, A, the optimizer, ranks in a shard group, bytes a
    second."""

    psi: int
    n: int
    preset: Preset
    micro_batches: int = 1
    optimizer: str = "adam"
    shard_size: int | None = None
    bandwidth: int | None = None
    dtypes: Mapping[str, str | None] = field(default_factory=dict)

    def text(self) -> str:
        words = [f"Psi = {count_text(self.psi)} parameters", f"n = {self.n} ranks", f"A = {self.micro_batches}"]
        if self.shard_size is not None:
            words.append(f"shard groups of {self.shard_size} ({self.n // self.shard_size} replicas)")
        changed = "".join(f", {name} {dtype or 'none'}" for name, dtype in self.dtypes.items())
        words += [f"recipe {self.preset.name}{changed}", self.optimizer]
        return ", ".join(words) + ": model states only"


def predict_lines(rows: Sequence[Row], question: Question) -> list[str]:
    """Model states and traffic of one rank, a line a stage, and below where the numbers are from."""
    columns = [
        ("", [NAMES[row.stage] for row in rows]),
        *((f"{c.value}s", [nbytes_text(row.nbytes[c]) for row in rows]) for c in MODEL_STATES),
        ("total a rank", [nbytes_text(row.total) for row in rows]),
    ]
    if any(row.unit_nbytes is not None for row in rows):
        columns.append(
            ("unit in use", ["-" if row.unit_nbytes is None else nbytes_text(row.unit_nbytes) for row in rows])
        )
    columns.append(("sent a step", [_sent(row, question) for row in rows]))
    columns.append(("in bytes", [nbytes_text(row.sent_nbytes) for row in rows]))
    if any(row.largest_psi is not None for row in rows):
        least = "smallest n" if question.shard_size is None else "smallest shard group"
        columns.append(("largest model that fits", [count_text(row.largest_psi or 0) for row in rows]))
        columns.append((least, ["none" if row.smallest_n is None else count_text(row.smallest_n) for row in rows]))
    if question.bandwidth is not None:
        columns.append(("step takes at least", [seconds_text(row.least_s or 0) for row in rows]))
    body = [[heading, *cells] for heading, cells in columns]
    lines = [question.text(), "", *table(list(zip(*body, strict=True)), right=range(1, len(columns)))]
    return [*lines, "", *_notes(question)]


def _sent(row: Row, question: Question) -> str:
    """Ring passes and the ring's factor: "2 Psi x 63/64"; in a hybrid also what goes across replicas."""
    n, s = question.n, question.shard_size or question.n
    if not row.stage.shards(Category.OPTIMIZER):
        s = n
    text = f"{float(row.volume):g} Psi x {s - 1}/{s}"
    if s < n:
        across = row.sent[Collective.ALL_REDUCE] / Fraction(question.psi, s) / Fraction(n // s - 1, n // s)
        text += f" + {float(across):g} Psi/{s} x {n // s - 1}/{n // s}"
    return text


def _notes(question: Question) -> Iterator[str]:
    preset = question.preset
    yield f"recipe  {preset.name}: {preset.about}"
    yield f"source  {preset.source}"
    if question.bandwidth is not None:
        yield (
            f"time    a lower bound: the larger of what a rank sends and what it receives on a ring, divided by "
            f"{nbytes_text(question.bandwidth)}/s each way; no latency, no computation"
        )


def json_lines(rows: Sequence[Row], question: Question) -> Iterator[dict[str, Any]]:
    """A line a stage: what was asked, and the answer. Bytes and elements are whole numbers where they are whole."""
    for row in rows:
        yield {
            "psi": question.psi,
            "n": question.n,
            "micro_batches": question.micro_batches,
            "shard_size": question.shard_size,
            "recipe": question.preset.name,
            "dtypes": dict(question.dtypes),
            "optimizer": question.optimizer,
            "stage": int(row.stage),
            "nbytes": {c.value: _number(v) for c, v in row.nbytes.items()},
            "total_nbytes": _number(row.total),
            "unit_nbytes": _number(row.unit_nbytes),
            "sent_numel": _number(row.sent_numel),
            "sent_nbytes": _number(row.sent_nbytes),
            "received_nbytes": _number(row.received_nbytes),
            "largest_psi": row.largest_psi,
            "smallest_n": row.smallest_n,
            "least_s": None if row.least_s is None else float(row.least_s),
        }


def _number(value: Fraction | None) -> int | float | None:
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)
