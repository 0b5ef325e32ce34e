"""From records to a verdict: every check on every case it speaks of. Pure; needs no torch, and nothing but the records.

A check is skipped with a reason, never left out: what is missing from this file would read as clean.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from zerobench.case import Case, Run
from zerobench.checks.catalogue import ALWAYS, CHECKS
from zerobench.checks.check import Check, Judgement, NotApplicable, Unreliable, View
from zerobench.finding import NOT_RUN, SHIMMED, Finding, Level, Status, Verdict
from zerobench.record import Record
from zerobench.scenarios import NOT_SIMULATED, SCENARIOS

Excuse = Mapping[str, object]
"""An xfail as a record keeps it: check, reason, and the axes that it is limited to (a value or a list of them)."""


def chosen(checks: Iterable[str]) -> list[Check]:
    """The checks of these ids in the order of the catalogue; the one that is always judged is among them."""
    return list(_chosen(frozenset(checks)))


@cache
def _chosen(wanted: frozenset[str]) -> tuple[Check, ...]:
    return tuple(check for check in CHECKS.values() if check.id in wanted or check.id == ALWAYS)


def plan(cases: Iterable[Case], checks: Iterable[str]) -> dict[str, Run]:
    """The runs that these checks need of these cases, by id, each once, in the order in which they are best done."""
    runs: dict[str, Run] = {}
    wanted = frozenset(checks)
    for case in cases:
        for scenario in _planned(wanted, case.simulated):
            run = case.run(scenario)
            runs.setdefault(run.id, run)
    return runs


@cache
def _planned(wanted: frozenset[str], simulated: bool) -> tuple[str, ...]:
    """The scenarios that these checks, and the one that is always judged, read of a case."""
    return tuple(dict.fromkeys(s for check in _chosen(wanted) for s in _scenarios(simulated, check))) or ("plain",)


def _scenarios(simulated: bool, check: Check) -> tuple[str, ...]:
    """The runs that a check reads of a case: of a simulated one those that need no values."""
    names = (*check.scenarios, *check.also)
    if not simulated:
        return names
    return tuple(s for s in names if SCENARIOS[s].simulable) if check.simulated else ()


def judge(
    suite: str,
    cases: Sequence[Case],
    checks: Iterable[str],
    records: Mapping[str, Record],
    *,
    by: str = "paper",
    excuses: Sequence[Excuse] = (),
    strict: bool = False,
) -> Verdict:
    """Every finding of `checks` on `cases`. by: which verdict counts, "paper" or "claim"."""
    rows, ids = chosen(checks), frozenset(checks)
    findings = []
    for case in cases:
        named: dict[str, str] = {}
        findings += [
            judge_case(suite, case, check, records, ids, by=by, excuses=excuses, named=named)
            for check in rows
            if check.over == "case"
        ]
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    findings += [
        _judge_family(suite, members, check, records, by=by, excuses=excuses)
        for check in rows
        if check.over == "family"
        for members in families.values()
    ]
    return Verdict(tuple(findings), strict)


def judge_case(
    suite: str,
    case: Case,
    check: Check,
    records: Mapping[str, Record],
    checks: Iterable[str],
    *,
    by: str,
    excuses: Sequence[Excuse] = (),
    named: dict[str, str] | None = None,
) -> Finding:
    """One check on one case. named: the ids of the case's runs by scenario, as far as an earlier check has asked for them;
    those that this one asks for are added."""
    named = {} if named is None else named
    scenarios = _scenarios(case.simulated, check)
    if not check.scenarios:  # what speaks of every run of the case
        scenarios = _planned(frozenset(checks), case.simulated)
    for scenario in scenarios:
        if scenario not in named:
            named[scenario] = case.run(scenario).id
    say = _speaker(suite, case.id, check)
    if case.simulated and not check.simulated:
        return say(actual=NOT_SIMULATED)
    absent = [named[s] for s in scenarios if named[s] not in records]
    if absent:
        return say(status=Status.ERROR, actual=f"{NOT_RUN}{', '.join(absent)}")
    found = {s: records[named[s]] for s in scenarios}
    if check.also:
        found = {s: r for s, r in found.items() if s not in check.also or r.status != "skip"}
    if check.scenarios and (obstacle := _obstacle(found.values())):
        return say(status=obstacle[0], actual=obstacle[1])
    if not check.scenarios and all(r.status == "skip" for r in found.values()):
        return say(actual=next(iter(found.values())).reason)
    view = View(case, found, record=found[check.scenarios[0]] if check.scenarios else None)
    return _excused(_say(say, check, view, by), [case], excuses)


def _judge_family(
    suite: str,
    members: Sequence[Case],
    check: Check,
    records: Mapping[str, Record],
    *,
    by: str,
    excuses: Sequence[Excuse],
) -> Finding:
    case = members[-1]
    say = _speaker(suite, case.family, check)
    if case.simulated and not check.simulated:
        return say(actual=NOT_SIMULATED)
    ids = [member.run(check.scenarios[0]).id for member in members]
    absent = [id for id in ids if id not in records]
    if absent:
        return say(status=Status.ERROR, actual=f"{NOT_RUN}{', '.join(absent)}")
    usable = [records[id] for id in ids if records[id].status == "ok"]
    if not usable:
        status, reason = _obstacle(records[id] for id in ids) or (Status.SKIP, "no run")
        return say(status=status, actual=reason)
    view = View(case, {check.scenarios[0]: usable[-1]}, family=tuple(usable), record=usable[-1])
    return _excused(_say(say, check, view, by), members, excuses)


def _speaker(suite: str, case: str, check: Check) -> Callable[..., Finding]:
    """Makes findings of `check` on `case`; a skip, where no status is given."""

    def say(status: Status = Status.SKIP, **more: Any) -> Finding:
        return Finding(suite, case, check.id, status, check.requirement, relation=check.kind, level=check.level, **more)

    return say


def _obstacle(records: Iterable[Record]) -> tuple[Status, str] | None:
    """Why these records cannot be judged, if they cannot."""
    for record in records:
        if record.status == "skip":
            return Status.SKIP, record.reason
        if record.status == "invalid":
            return Status.INVALID, record.reason
        if record.status != "ok":
            return Status.SKIP, f"the run {record.id} did not complete: see {ALWAYS}"
    return None


def _say(say: Callable[..., Finding], check: Check, view: View, by: str) -> Finding:
    if check.simulated == "world" and (few := _few(view.records.values())):
        return say(actual=few)
    try:
        word: Judgement = check.judge(view)
    except NotApplicable as reason:
        return say(actual=str(reason))
    except Unreliable as reason:
        return say(status=Status.INVALID, actual=str(reason))
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        return say(status=Status.ERROR, actual=f"zerobench's own fault, at {at}: {type(fault).__name__}: {fault}")
    faked = tuple(dict.fromkeys(what for r in (*view.records.values(), *view.family) for what in r.faked))
    provisional = f"; provisional, {len(faked)} value{'s' if len(faked) > 1 else ''} made up" if faked else ""
    shimmed = tuple(dict.fromkeys(what for r in (*view.records.values(), *view.family) for what in r.shimmed))
    provisional += "; shimmed" if shimmed else ""
    return say(
        status=word.claim if by == "claim" else word.paper,
        claim=word.claim,
        paper=word.paper,
        expected=word.expected,
        actual=word.actual + provisional,
        ranks=word.ranks,
        detail=(*word.detail, *(f"made up: {what}" for what in faked), *(SHIMMED + what for what in shimmed)),
        metrics=word.metrics,
    )


def _few(records: Iterable[Record]) -> str:
    """Why a check of whole worlds has nothing to say, if it has not."""
    for record in records:
        if record.partial:
            ran = ", ".join(str(sample.rank) for sample in record.samples)
            return f"simulated: needs every rank, and of {record.run.case.world_size} only ranks {ran} ran"
    return ""


def _excused(finding: Finding, cases: Sequence[Case], excuses: Sequence[Excuse]) -> Finding:
    """`finding` with an excuse of its suite applied: a failure foretold is no news, a pass foretold as a failure is."""
    if finding.level is Level.INFO or finding.status not in (Status.PASS, Status.FAIL):
        return finding
    for excuse in excuses:
        if excuse.get("check") == finding.check and any(_meant(excuse, case) for case in cases):
            status = Status.XFAIL if finding.status is Status.FAIL else Status.XPASS
            return replace(finding, status=status, detail=(*finding.detail, f"known: {excuse.get('reason', '')}"))
    return finding


def _meant(excuse: Excuse, case: Case) -> bool:
    axes: dict[str, tuple[object, ...]] = {
        "implementation": (case.implementation, case.reference),
        "model": (case.model,),
        "world_size": (case.world_size,),
        "precision": (case.precision,),
        "A": (case.micro_batches,),
    }
    for axis, values in axes.items():
        if axis in excuse:
            given = excuse[axis]
            allowed = given if isinstance(given, (list, tuple)) else [given]
            if not any(v in allowed for v in values):
                return False
    return True
