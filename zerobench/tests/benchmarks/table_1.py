"""Table 1 and Figure 1 of the ZeRO paper beside what the suite at-scale measured, from one result of it, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerobench.case import Case
from zerobench.record import Record
from zerobench.store import read
from zerobench.terms import MODEL_STATES, Moment
from zerobench.units import nbytes_text

GB = 10**9
MODELS = {7_500_000_000: "gpt-7500m", 128_000_000_000: "gpt-128b", 1_000_000_000_000: "gpt-1t"}
COLUMNS = {"dp": "ddp", "p_os": "zero1", "p_os_g": "zero2", "p_os_g_p": "zero3"}
PUBLISHED = yaml.safe_load((Path(__file__).parent.parent / "data" / "published.yaml").read_text())["zero_paper"]


class Number(NamedTuple):
    """One number that the paper prints: what it is of, and as printed, in GB (10**9 bytes)."""

    model: str
    implementation: str
    n: int
    printed: str

    @property
    def run_id(self) -> str:
        name = self.implementation
        return Case(name, name, self.model, self.n, "fp16", launch="simulate").run("plain").id

    def agrees(self, nbytes: Fraction | int) -> bool:
        """Whether bytes are this number as printed: rounded in one column of the paper, cut off in the others."""
        digit = Fraction(1, 10 ** len(self.printed.partition(".")[2]))
        return -digit / 2 <= Fraction(nbytes) / GB - Fraction(self.printed) < digit


def numbers() -> Iterator[Number]:
    """Every number of Table 1, and the worked example of Figure 1, which has the column of plain data parallelism."""
    for row in [*PUBLISHED["table1"]["rows"], PUBLISHED["figure1"]]:
        for column, printed in row["published"].items():
            yield Number(MODELS[row["psi"]], COLUMNS[column], row["n"], str(printed))


def held(record: Record) -> list[int]:
    """Bytes of model states at the last BACKWARD, by rank that ran."""
    last = ([h for h in s.holdings if h.moment is Moment.BACKWARD][-1] for s in record.samples)
    return [sum(h.claimed[c.value] for c in MODEL_STATES) for h in last]


def page(result: Path) -> str:
    """Raises KeyError where the result lacks a case."""
    results = read(result)
    records: dict[str, Any] = results.records
    about = results.provenance
    lines = [
        "# Worlds that were simulated",
        "",
        "No number here is a measurement of real memory: tensors had shapes, dtypes and storages, and no bytes; collectives "
        "had no peers.",
        f"Made from a result of `zerobench run at-scale` by `python -m zerobench.tests.benchmarks.simulation_cost --at-scale "
        f"RESULT` (torch {about.torch}, Python {about.python}).",
        "",
        "## Table 1 of the ZeRO paper, executed",
        "",
        "Model states of the fuller of the first and the last rank, GB; in brackets what the paper prints.",
        "",
        "| model | n | DDP | stage 1 | stage 2 | stage 3 |",
        "|---|---|---|---|---|---|",
    ]
    printed = {(x.model, x.implementation, x.n): x for x in numbers()}
    for model in MODELS.values():
        for n in sorted({x.n for x in printed.values()}):
            cells = []
            for name in COLUMNS.values():
                number = printed.get((model, name, n), Number(model, name, n, ""))
                most = max(held(records[number.run_id]))
                beside = f" ({number.printed}{'' if number.agrees(most) else ', differs'})" if number.printed else ""
                cells.append(f"{most / GB:.6g}{beside}")
            lines.append(f"| {model} | {n} | {' | '.join(cells)} |")
    psi = {r.run.case.model: r.model.psi for r in records.values()}
    lines += ["", "Psi: " + ", ".join(f"{model} {psi[model]:,}" for model in MODELS.values()) + ".", ""]
    lines += ["## Peaks and traffic at n = 64", "", "| case | peak of a step | when | sent a step, elements / Psi |"]
    lines += ["|---|---|---|---|"]
    for model in MODELS.values():
        for name in COLUMNS.values():
            record = records[Number(model, name, 64, "").run_id]
            last = max(p.step for p in record.samples[0].peaks)
            top = max((p for s in record.samples for p in s.peaks if p.step == last), key=lambda p: p.nbytes)
            sent = sum(c.numel * c.kind.ring_passes for c in record.samples[0].calls if c.step == last)
            lines.append(f"| {name}, {model} | {nbytes_text(top.nbytes)} | {top.phase} | {sent / psi[model]:.3f} |")
    seconds = [r.wall_s for r in records.values()]
    lines += [
        "",
        f"{len(seconds)} runs, {sum(seconds):.0f} s together, {max(seconds):.0f} s the longest, on {about.cores} cores and "
        "beside whatever else they did.",
        "",
        "## What it costs",
        "",
        "Processor seconds of one rank: flat in parameters (width) and in ranks, linear in depth. "
        "`python -m zerobench.tests.benchmarks.simulation_cost` draws it.",
        "",
        "![cost against parameters, depth and ranks](simulation.svg)",
    ]
    return "\n".join(lines) + "\n"
