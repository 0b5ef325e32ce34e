"""A prediction as a table."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.predict import Row
from zerobench.report.text import table
from zerobench.terms import MODEL_STATES, Stage
from zerobench.units import count_text, nbytes_text

NAMES = {Stage.DDP: "DDP", Stage.OPTIMIZER: "stage 1", Stage.GRADIENT: "stage 2", Stage.PARAMETER: "stage 3"}


def predict_lines(rows: Sequence[Row], psi: int, n: int, recipe: str, a: int) -> list[str]:
    """Model states and traffic of one rank, a line a stage."""
    heading = ["", *(c.value + "s" for c in MODEL_STATES), "total a rank", "sent a step", "in bytes"]
    card = any(row.largest_psi is not None for row in rows)
    if card:
        heading += ["largest model that fits", "smallest n"]
    body = []
    for row in rows:
        line = [NAMES[row.stage], *(nbytes_text(row.nbytes[c]) for c in MODEL_STATES), nbytes_text(row.total)]
        line += [f"{float(row.volume):g} Psi x {n - 1}/{n}", nbytes_text(row.sent_nbytes)]
        if card:
            line += [count_text(row.largest_psi or 0), "none" if row.smallest_n is None else str(row.smallest_n)]
        body.append(line)
    title = f"Psi = {count_text(psi)} parameters, n = {n} ranks, A = {a}, recipe {recipe}: model states only"
    return [title, "", *table([heading, *body], right=range(1, len(heading)))]
