"""Byte baselines: what of a result is exact and the same on every machine, kept, and compared by equality.

Exact and portable are the bytes that an engine claims, the live bytes at rest, the collectives that it issues and its
padding: they follow from shapes, dtypes and the implementation. Peaks are not kept, because kernels of different
processors need different workspaces; they have checks of their own. Less is a change too: a test that only more bytes
can fail would not see half of a state go missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from zerobench.baseline_file import SCHEMA, BaselineError, By, read, write
from zerobench.case import Case
from zerobench.checks.check import SUBJECT_PHASES, ranks_text
from zerobench.finding import Finding, Status, worst
from zerobench.judge import plan
from zerobench.record import Holding, Provenance, Record, Sample
from zerobench.store import Results
from zerobench.terms import Moment

BYTES, TRAFFIC = "baseline.bytes", "baseline.traffic"
REQUIREMENT = {
    BYTES: "bytes that each rank holds are those of the accepted baseline, no more and no less",
    TRAFFIC: "collectives of each rank, their kinds, dtypes and elements, are those of the accepted baseline",
}
MAX_LINES = 12  # of differences that a finding spells out

Launches = Mapping[str, Sequence[Record]]
"""Completed records by run id, one a launch."""


@dataclass(frozen=True)
class Exact:
    """The exact numbers of one run; lists are by rank.

    nbytes: claimed bytes of each category at the last BACKWARD, and all live ones at the last STEPPED (`live at rest`);
    empty where the run did not watch memory. traffic: calls and elements of the full tensors by kind and dtype, over
    the build and over all steps; `ring` sums elements times the passes that their kind makes round a ring.
    """

    psi: int
    padding_numel: int
    nbytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    traffic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record) -> Exact:
        assert record.model is not None and record.claims is not None
        return cls(
            record.model.psi,
            record.claims.padding_numel,
            _by_rank([_held(sample) for sample in record.samples]),
            _by_rank([_sent(sample, record.run.case.world_size) for sample in record.samples]),
        )

    def numbers(self, check: str) -> dict[str, tuple[int, ...]]:
        """What `check` compares, by name."""
        if check == TRAFFIC:
            return dict(self.traffic)
        return {"Psi": (self.psi,), "padding": (self.padding_numel,), **self.nbytes} if self.nbytes else {}


@dataclass(frozen=True)
class ByteBaseline:
    """runs: exact numbers by run id; one that was skipped has none. cases: the runs of each case."""

    suite: str
    by: By
    runs: Mapping[str, Exact]
    cases: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, results: Results) -> ByteBaseline:
        """Raises BaselineError for a result with a failed run or with launches that disagree: neither is a baseline."""
        cases = runs_of(results.provenance)
        runs = {}
        for run_id in sorted({r for ids in cases.values() for r in ids}):
            record = results.records.get(run_id)
            if record is None or record.status not in ("ok", "skip"):
                reason = f"{record.status}: {record.reason}" if record else "not run"
                raise BaselineError(
                    f"{results.path}: {run_id}: {reason}; a baseline needs every run: do it again, with --resume {results.path}"
                )
            each = exacts(results.launches.get(run_id, ()))
            if len(each) > 1:
                raise BaselineError(
                    f"{results.path}: {run_id}: its launches differ in what should be exact; what varies has no baseline"
                )
            if record.status == "ok":
                runs[run_id] = each[0]
        return cls(results.provenance.suite, By.of(results.provenance), runs, cases)

    def save(self, path: Path) -> bool:
        """Whether anything changed. Raises BaselineError."""
        head = {"baseline": "bytes", "schema": SCHEMA, "suite": self.suite, "by": self.by}
        return write(path, head, {"cases": self.cases, "runs": self.runs})

    @classmethod
    def load(cls, path: Path) -> ByteBaseline:
        """Raises BaselineError, and FileNotFoundError where there is no such file."""
        document = read(path, "bytes")
        runs = document.section(Exact, "runs")
        for name, exact in runs.items():
            numbers = [exact.psi, exact.padding_numel]
            numbers += [v for each in (exact.nbytes, exact.traffic) for values in each.values() for v in values]
            if min(numbers) < 0:
                raise document.error(f"{name}: a negative number", "runs", name)
        cases = {name: tuple(c) for name, c in document.section(list[str], "cases").items()}  # type: ignore[type-abstract]
        return cls(document.value(str, "suite"), document.value(By, "by"), runs, cases)


def runs_of(about: Provenance) -> dict[str, tuple[str, ...]]:
    """The run ids of each case of a result, by case id."""
    cases = [Case.from_json(dict(case)) for case in about.cases]
    return {case.id: tuple(plan([case], about.checks)) for case in cases}


def compare(
    baseline: ByteBaseline, cases: Mapping[str, tuple[str, ...]], launches: Launches, reasons: Mapping[str, str]
) -> list[Finding]:
    """Two findings a case, of the result's and of the baseline's cases alike. reasons: why a run has no launch."""
    measured = cache(lambda run: exacts(launches.get(run, ())))
    return [
        _judge(baseline, case, cases.get(case), measured, reasons, check)
        for case in dict.fromkeys([*cases, *baseline.cases])
        for check in (BYTES, TRAFFIC)
    ]


def judge(
    baseline: ByteBaseline,
    case: str,
    runs: tuple[str, ...] | None,
    launches: Launches,
    reasons: Mapping[str, str],
    check: str,
) -> Finding:
    """One of the two findings of one case. runs: those of the result; None where it has no such case."""
    return _judge(baseline, case, runs, lambda run: exacts(launches.get(run, ())), reasons, check)


def _judge(
    baseline: ByteBaseline,
    case: str,
    runs: tuple[str, ...] | None,
    measured: Callable[[str], list[Exact]],
    reasons: Mapping[str, str],
    check: str,
) -> Finding:
    finding = Finding(baseline.suite, case, check, Status.PASS, REQUIREMENT[check], relation="==")
    if runs is None:
        return replace(finding, status=Status.MISSING, actual="the case is in the baseline, not in the result")
    if case not in baseline.cases:
        return replace(finding, status=Status.MISSING, actual="the case is in the result, not in the baseline")
    statuses, gaps, differences, compared = [], [], [], 0
    for run in dict.fromkeys([*runs, *baseline.cases[case]]):
        old, seen = baseline.runs.get(run), measured(run)
        if old is None and not seen:
            continue
        if old is None or not seen:
            there = "measured, not in the baseline" if old is None else "in the baseline, not measured"
            gaps.append(f"{run}: {there}" + (f" ({reasons[run]})" if run in reasons else ""))
            statuses.append(Status.MISSING)
            continue
        before = old.numbers(check)
        found = next((d for s in seen if (d := differences_of(run, before, s.numbers(check)))), [])
        statuses.append(Status.FAIL if found else Status.PASS)
        differences += found
        compared += len(before)
    if not statuses:
        return replace(finding, status=Status.SKIP, actual="no run of this case was measured, then or now")
    if check == BYTES and not compared and not differences and not gaps:
        return replace(finding, status=Status.SKIP, actual="no run of this case watches memory")
    finding = replace(finding, status=worst(statuses), expected=f"equal to {baseline.by}")
    if not differences:
        return replace(finding, actual="; ".join(gaps) or f"{compared} numbers, all equal", detail=())
    differences.sort(key=lambda d: -abs(d.delta))
    first, rest = differences[0], len(differences) - 1
    lines = [d.text for d in differences[1:]] + gaps
    return replace(
        finding,
        expected=f"{first.name} {first.before} ({baseline.by})",
        actual=f"{first.text}" + (f", and {rest} more" if rest else ""),
        ranks=tuple(sorted({r for d in differences for r in d.ranks})),
        detail=(*lines[:MAX_LINES], *([f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else ())),
        metrics=tuple((f"{d.name} delta", float(d.delta)) for d in differences[:1]),
    )


@dataclass(frozen=True)
class Difference:
    """One number of one run on some ranks. delta: over those ranks together."""

    name: str
    before: str
    text: str
    delta: int
    ranks: tuple[int, ...]


def differences_of(
    run: str, old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]
) -> list[Difference]:
    out = []
    scenario = run.rpartition("@")[2]
    for name in sorted({*old, *new}):
        a, b = old.get(name, ()), new.get(name, ())
        n = max(len(a), len(b))
        a, b = a + (0,) * (n - len(a)), b + (0,) * (n - len(b))
        by_change: dict[tuple[int, int], list[int]] = {}
        for rank, pair in enumerate(zip(a, b, strict=True)):
            if pair[0] != pair[1]:
                by_change.setdefault(pair, []).append(rank)
        for (before, after), ranks in by_change.items():
            what = _unit(name)
            where = "" if n == 1 and name in ("Psi", "padding") else f" on {ranks_text(ranks, n)}"
            text = f"{name} {after} {what}{where} ({after - before:+d}, from {before}; {scenario})"
            out.append(Difference(name, f"{before} {what}{where}", text, (after - before) * len(ranks), tuple(ranks)))
    return out


def _unit(name: str) -> str:
    if name.endswith("calls"):
        return "calls"
    return "elements" if name in ("Psi", "padding") or name.endswith(("elements", "ring")) else "B"


def exacts(launches: Sequence[Record]) -> list[Exact]:
    """The exact numbers of these launches, in their order, each that differs from those before it.

    Launches that were read from one file share what is equal in them, so most are known by what they share, uncounted.
    """
    found: list[Exact] = []
    seen, known = set(), set()
    for record in launches:
        whole = (id(record.model), id(record.claims), *[id(s.calls) for s in record.samples])
        whole += tuple([id(s.holdings) for s in record.samples])
        if whole in known:
            continue
        known.add(whole)
        key: list[int] = [id(record.model), id(record.claims)]
        for sample in record.samples:
            key.append(id(sample.calls))
            key += [value for h in sample.holdings for value in (id(h.claimed), h.live)]
        if tuple(key) not in seen:
            seen.add(tuple(key))
            if (exact := Exact.of(record)) not in found:
                found.append(exact)
    return found


def _last(sample: Sample, moment: Moment) -> Holding | None:
    last = None
    for holding in sample.holdings:
        if holding.moment is moment and (last is None or holding.step > last.step):
            last = holding
    return last


def _held(sample: Sample) -> dict[str, int]:
    held: dict[str, int] = {}
    if (last := _last(sample, Moment.BACKWARD)) is not None:
        held |= last.claimed
    if (last := _last(sample, Moment.STEPPED)) is not None:
        held["live at rest"] = last.live
    return held


def _sent(sample: Sample, n: int) -> dict[str, int]:
    sent: Counter[str] = Counter()
    names: dict[tuple[Any, ...], str] = {}
    for call in sample.calls:
        if call.phase in SUBJECT_PHASES or call.phase == "build":
            alike = (call.phase == "build", call.kind, call.dtype, call.group)
            if (name := names.get(alike)) is None:
                world = (
                    f" in groups of {len(call.group)}"
                    if len(call.group) != len(set(call.group) | {sample.rank})
                    else ""
                )
                name = f"{'build, ' if call.phase == 'build' else ''}{call.kind.value} {call.dtype}{world}"
                names[alike] = name
            sent[f"{name} calls"] += 1
            sent[f"{name} elements"] += call.numel
            if call.phase != "build":
                sent["ring"] += call.numel * call.kind.ring_passes
    return dict(sent)


def _by_rank(each: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    each = list(each)
    return {name: tuple(row.get(name, 0) for row in each) for name in sorted({k for row in each for k in row})}
