"""What no run can have written: a file that decodes and still cannot be judged is refused where it is read, with the
field that is wrong, so that nothing behind has to defend itself against a world of -1 ranks or a model without elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from zerobench.case import Case, Run
from zerobench.claims import Claims
from zerobench.record import ModelFacts, Provenance, Record, Sample
from zerobench.terms import FEATURES, PRECISIONS

MOST = 1 << 20
"""Of ranks, micro-batches, steps: more than anybody has, and few enough to count through."""
STATUSES = ("ok", "error", "skip", "invalid")
MOST_SECONDS = 1e9


def implausible(item: Provenance | Record, *, known: bool = False) -> str:
    """The first thing that is wrong, with its field; "" for a plausible item.

    known: every part that the record shares with others (its run, its claims, its model, its calls) was looked at in one
    of those.
    """
    if known and isinstance(item, Record) and _in_order(item):
        return ""
    return next(_provenance(item) if isinstance(item, Provenance) else _record(item, known), "")


def _in_order(record: Record) -> bool:
    """Whether all that is this record's own is as in nearly every record; else `_record` tells what is not, if anything."""
    if record.status != "ok" or record.claims is None or record.model is None or not 0 <= record.wall_s <= MOST_SECONDS:
        return False
    steps = len(record.samples[0].times_s) if record.samples else 0
    for rank, sample in enumerate(record.samples):
        if sample.rank != rank or len(sample.times_s) != steps or sample.wire is not None:
            return False
        if len(sample.allocator) != len(sample.holdings):
            return False
        for seconds in sample.times_s:
            if not 0 < seconds <= MOST_SECONDS:
                return False
    return 0 < len(record.samples) <= record.run.case.world_size


def _provenance(about: Provenance) -> Iterator[str]:
    for i, data in enumerate(about.cases):
        try:
            case = Case.from_json(dict(data))
        except ValueError as error:
            yield f"provenance.cases[{i}]: {error}"
        else:
            yield from _case(case, f"provenance.cases[{i}]")
    if about.judge not in ("paper", "claim"):
        yield f"provenance.judge: {about.judge!r} is neither 'paper' nor 'claim'"
    try:
        datetime.fromisoformat(about.started)
    except ValueError:
        yield f"provenance.started: {about.started!r} is not a time"
    yield from _counts((("cores", about.cores), ("device_count", about.device_count)), "provenance", 0)


def _record(record: Record, known: bool) -> Iterator[str]:
    if record.status not in STATUSES:
        yield f"record.status: {record.status!r} is none of {', '.join(STATUSES)}"
    if not known:
        yield from _run(record.run)
        if record.model is not None:
            yield from _model(record.model)
    if record.status == "ok":
        if record.claims is None or record.model is None or not record.samples:
            yield "record: a run that is ok has claims, a model and samples"
        elif not known:
            yield from _claims(record.claims)
    ranks, n = [sample.rank for sample in record.samples], record.run.case.world_size
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < n for rank in ranks):
        yield f"record.samples: ranks {ranks[:8]} of {n}"
    for i, sample in enumerate(record.samples):
        yield from _sample(sample, f"record.samples[{i}]", known)
    if record.status == "ok" and len({len(sample.times_s) for sample in record.samples}) > 1:
        yield "record.samples: ranks that timed different numbers of steps"
    if not 0 <= record.wall_s <= MOST_SECONDS:
        yield f"record.wall_s: {record.wall_s} s"


def _run(run: Run) -> Iterator[str]:
    yield from _case(run.case, "record.run.case")
    if run.saved_at is not None:
        yield from _counts((("saved_at", run.saved_at),), "record.run", 1)


def _case(case: Case, where: str) -> Iterator[str]:
    if case.precision not in PRECISIONS:
        yield f"{where}.precision: {case.precision!r} is none of {', '.join(PRECISIONS)}"
    yield from _counts((("world_size", case.world_size), ("micro_batches", case.micro_batches)), where, 1)
    yield from _counts((("warmup", case.warmup), ("measured", case.measured)), where, 0)
    for name, value in case.options.items():
        if not isinstance(value, (str, int, float, type(None))):
            yield f"{where}.options.{name}: a {type(value).__name__}, not text, a number or true/false"


def _claims(claims: Claims) -> Iterator[str]:
    """A feature that only a later version knows is passed over, as a key is."""
    supports = claims.supports
    known = claims if supports <= FEATURES else replace(claims, supports=supports & FEATURES)
    yield from (f"record.claims: {problem}" for problem in known.problems())


def _model(model: ModelFacts) -> Iterator[str]:
    where = "record.model"
    yield from _counts((("psi", model.psi),), where, 1, math.inf)
    named = [("frozen", model.frozen), ("buffers_nbytes", model.buffers_nbytes)]
    named += [("examples", model.examples), ("tokens", model.tokens), ("bucket_numel", model.bucket_numel or 0)]
    yield from _counts(named, where, 0, math.inf)
    for what, values in (("units", model.units), ("parameters", model.parameters.values())):
        if any(value < 0 for value in values):
            yield f"{where}.{what}: a negative number of elements"


def _sample(sample: Sample, where: str, known: bool) -> Iterator[str]:
    for i, seconds in enumerate(sample.times_s):
        if not 0 < seconds <= MOST_SECONDS:
            yield f"{where}.times_s[{i}]: {seconds} is not a positive number of seconds"
    if sample.wire is not None and sample.wire.steps < 1:
        yield f"{where}.wire.steps: {sample.wire.steps}, not at least 1"
    if len(sample.allocator) not in (0, len(sample.holdings)):
        yield f"{where}.allocator: {len(sample.allocator)} counts for {len(sample.holdings)} holdings"
    if known:
        return
    for i, call in enumerate(sample.calls):
        if call.numel < 0 or call.nbytes < 0:
            yield f"{where}.calls[{i}]: a negative number of elements or bytes"


def _counts(named: Iterable[tuple[str, int]], where: str, least: int, most: float = MOST) -> Iterator[str]:
    for name, count in named:
        if not least <= count <= most:
            yield f"{where}.{name}: {count}, not {least} or more" + (f" and at most {most:,}" if count > most else "")
