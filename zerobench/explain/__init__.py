"""Why the paper's formula became what was measured: from records, step by step, until nothing but a rest is left.

Each step is a byte count that the record holds or that follows from its claims. What no step accounts for is the
unexplained rest: it stands last, and its share of the whole is the score. A step for which the record has no evidence is
named, and neither guessed nor counted as zero.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerobench.case import Case
from zerobench.checks.check import View
from zerobench.explain.outer import resident_at_peak, resident_at_rest, witnessed
from zerobench.explain.peak import at_peak
from zerobench.explain.rest import at_rest
from zerobench.explain.waterfall import Waterfall
from zerobench.record import Record
from zerobench.scenarios import SIZES


def explain(case: Case, records: Mapping[str, Record]) -> tuple[Waterfall, ...]:
    """The waterfalls of one case, each for the rank that holds the most. records: by run id, as `store.read` has them.

    Read are the run "plain" (the case's own model: at rest and at the peak of a step), and of the larger models that
    show what lies around tensors the largest that is there, or else "wire". Raises ValueError where none of these has
    a usable record, with the reason.
    """
    found: list[Waterfall] = []
    reasons = []
    for scenarios, kinds in (
        (("plain",), (at_rest, at_peak)),
        (tuple(reversed(SIZES)), (resident_at_rest, resident_at_peak)),
        (("wire",), (witnessed,)),
    ):
        if "wire" in scenarios and any(w.outer for w in found):
            continue
        usable: dict[str, Record] = {}
        for scenario in scenarios:
            record = records.get(case.run(scenario).id)
            if record is None:
                reasons.append(f"{scenario}: not in this file")
            elif why := _unusable(record):
                reasons.append(f"{scenario}: {why}")
            else:
                usable[scenario] = record
        if usable:
            view = View(case, usable, record=next(iter(usable.values())))
            found += [waterfall for kind in kinds if (waterfall := kind(view)) is not None]
    if not found:
        raise ValueError(f"{case.id}: no run that can be explained ({'; '.join(reasons)}); `conform` makes them all")
    return tuple(found)


def _unusable(record: Record) -> str:
    """Why a record says nothing about memory; empty where it does."""
    if record.status != "ok":
        return f"{record.status}: {record.reason}" if record.reason else record.status
    if record.claims is None or record.model is None:
        return "without claims or model"
    return "" if any(sample.holdings for sample in record.samples) else "memory was not watched"


__all__ = ["explain"]
