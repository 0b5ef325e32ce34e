"""The conformance matrix, implementation by check, made from records by one command and never by hand.

A cell sums up the findings of one check on every case of an implementation, and shows both verdicts: green where claim
and paper hold, amber where only the implementation's own claims do, red where not even they do. An xfail changes what
a run's exit code is, never a colour here; its reason stands with the cell. What was skipped is grey, with its reason.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.finding import SHIMMED, Finding, Status
from zerobench.judge import judge, plan
from zerobench.record import Provenance, Record
from zerobench.store import read


class Colour(Enum):
    """What a cell says, the most telling first; the value is the word in the table."""

    RED = "FAIL"
    DOUBT = "?"
    AMBER = "own"
    GREEN = "pass"
    GREY = "–"


MEANING = {
    Colour.GREEN: "does what it claims and what the paper's stage does",
    Colour.AMBER: "does what it claims, and not what the paper's stage does",
    Colour.RED: "does not do what it claims",
    Colour.DOUBT: "not judged: an instrument disagreed with its witness, or the run is missing",
    Colour.GREY: "does not apply or is not supported, for the reason given below",
}


def row_name(case: Case) -> str:
    """What stands at the head of a case's findings. What was simulated stands apart from what was measured."""
    return f"{case.implementation} (simulated)" if case.simulated else case.implementation


def colour_of(finding: Finding) -> Colour:
    """Of one finding, by its two verdicts; an excuse (xfail, xpass) does not change them."""
    if Status.FAIL in (finding.claim, finding.paper):
        return Colour.RED if finding.claim is Status.FAIL else Colour.AMBER
    if finding.claim is not None:
        return Colour.GREEN
    return Colour.GREY if finding.status is Status.SKIP else Colour.DOUBT


_PLACE = re.compile(r"/(?:[^\s/\"':]+/)+(?=(?:site-packages|zerobench|python3\.\d+)/)")


def _portable(text: str) -> str:
    """`text` without what lies around packages in the paths of a stack: a matrix is published, and a path is one machine's."""
    return _PLACE.sub("", text)


@dataclass
class Cell:
    """Every finding of a check on an implementation, by the id of the case (or family of cases) it is about."""

    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def colour(self) -> Colour:
        present = {colour_of(f) for f in self.findings.values()}
        return next((c for c in Colour if c in present), Colour.GREY)

    def telling(self) -> list[Finding]:
        """The findings that gave the cell its colour."""
        return [f for f in self.findings.values() if colour_of(f) is self.colour]


@dataclass
class Matrix:
    """cells: by (implementation, check). cases: by the id in findings, the cases meant: what a command repeats. shims: by
    implementation, what it was given a stand-in for. libraries: by name and version, the implementations that it stands
    behind."""

    implementations: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    cases: dict[str, list[Case]] = field(default_factory=dict)
    sources: list[Provenance] = field(default_factory=list)
    shims: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, list[str]] = field(default_factory=dict)

    def add(
        self, about: Provenance, cases: Sequence[Case], findings: Iterable[Finding], records: Iterable[Record] = ()
    ) -> None:
        """Take in one result, its records for the versions of libraries. Where two results speak of the same case and
        check, the later one counts."""
        self.sources.append(about)
        mine: dict[str, list[Case]] = {}
        for case in cases:
            mine.setdefault(case.id, []).append(case)
            mine.setdefault(case.family, []).append(case)
            if row_name(case) not in self.implementations:
                self.implementations.append(row_name(case))
        self.cases |= mine
        for finding in findings:
            finding = replace(
                finding, actual=_portable(finding.actual), detail=tuple(_portable(line) for line in finding.detail)
            )
            implementation = row_name(mine[finding.case][0])
            self.cells.setdefault((implementation, finding.check), Cell()).findings[finding.case] = finding
            for line in finding.detail:
                if line.startswith(SHIMMED):
                    self.shims[implementation] = line.removeprefix(SHIMMED)

        for record in records:
            for library in record.libraries:
                behind = self.libraries.setdefault(library, [])
                if (name := row_name(record.run.case)) not in behind:
                    behind.append(name)

    def head(self, implementation: str) -> str:
        """What stands over its column."""
        return f"{implementation} (shimmed)" if implementation in self.shims else implementation

    def made_with(self) -> list[str]:
        """Each result's versions, and those of the libraries behind some columns, a line each."""
        lines = list(dict.fromkeys(versions(source) for source in self.sources))
        return lines + [f"{library}: {', '.join(names)}" for library, names in sorted(self.libraries.items())]

    def caveats(self) -> list[str]:
        """What no column of shimmed results says, a line each."""
        return [
            f"{name} is shimmed, and this is no verdict on its library: {what}" for name, what in self.shims.items()
        ]

    @property
    def checks(self) -> list[str]:
        """Those that any cell is about, in the order of the specification."""
        present = {check for _, check in self.cells}
        return [check for check in CHECKS if check in present]

    def cell(self, implementation: str, check: str) -> Cell:
        return self.cells.get((implementation, check), Cell())

    def command(self, finding: Finding) -> str:
        """What a reader types to see this one finding again."""
        cases = self.cases[finding.case]
        first = cases[0]
        if first.micro_batches != 1 or first.simulated:
            return f"zerobench run {shlex.quote(finding.suite)} -k {shlex.quote(f'{finding.case}::{finding.check}')}"
        words = ["zerobench", "conform", first.reference, "--check", finding.check, "--model", first.model]
        words += ["--world-size", ",".join(str(case.world_size) for case in cases), "--precision", first.precision]
        for name, value in first.options.items():
            words += ["--option", f"{name}={value}"]
        if colour_of(finding) is Colour.AMBER:
            words += ["--judge", "paper"]
        return shlex.join(words)

    def grey(self, implementation: str) -> dict[str, list[str]]:
        """Why an implementation's grey cells are grey: reason -> checks."""
        reasons: dict[str, list[str]] = {}
        for check in self.checks:
            cell = self.cell(implementation, check)
            if cell.colour is Colour.GREY:
                said = dict.fromkeys(f.actual for f in cell.findings.values()) or {"not run": None}
                reasons.setdefault("; ".join(said), []).append(check)
        return reasons


def matrix_of(paths: Iterable[Path]) -> Matrix:
    """The matrix of results files. Raises StoreError for one that cannot be read.

    What several files have of the same cases is judged as one result: by the checks of any, on the latest record of
    each run, with the judge and the excuses of the latest file. So a file of a few runs mends or adds to one of all.
    """
    pools: dict[tuple[str, str], _Pool] = {}
    sources = []
    for path in paths:
        results = read(path)
        about = results.provenance
        sources.append(about)
        cases = [Case.from_json(dict(case)) for case in about.cases]
        for case in cases:
            pool = pools.setdefault((about.suite, case.family), _Pool(about))
            pool.about = about
            pool.cases[case.id] = case
            pool.checks |= dict.fromkeys(about.checks)
            for id in plan([case], about.checks):
                if id in results.records:
                    pool.records[id] = results.records[id]
    matrix = Matrix()
    for pool in pools.values():
        about, cases = pool.about, list(pool.cases.values())
        verdict = judge(about.suite, cases, list(pool.checks), pool.records, by=about.judge, excuses=about.xfail)
        matrix.add(about, cases, verdict.findings, pool.records.values())
    matrix.sources = sources
    return matrix


@dataclass
class _Pool:
    """What results have of one family of cases. about: the latest of them."""

    about: Provenance
    cases: dict[str, Case] = field(default_factory=dict)
    checks: dict[str, None] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)


def json_lines(matrix: Matrix) -> list[str]:
    """The whole matrix, a line of JSON a finding: its column (`row_name`), its colour and what the finding says. Before
    them one line with what each result was made with, and what was not the real thing."""
    lines = [json.dumps({"made_with": matrix.made_with(), "shimmed": matrix.shims})]
    for (implementation, check), cell in matrix.cells.items():
        for finding in cell.findings.values():
            head = {"implementation": implementation, "check": check, "colour": colour_of(finding).name.lower()}
            lines.append(json.dumps(head | finding.to_json()))
    return lines


def versions(source: Provenance) -> str:
    """Where and with what a result was made, in one line; no host name."""
    commit = f" at {source.commit[:12]}{', changed' if source.dirty else ''}" if source.commit else ""
    return (
        f"{source.suite}: zerobench {source.zerobench}{commit}, torch {source.torch}, {source.backend or 'no backend'} "
        f"on {source.device} ({source.cores} cores), Python {source.python}, {source.started[:10]}"
    )


def counts(matrix: Matrix, implementation: str) -> Mapping[Colour, int]:
    found = [matrix.cell(implementation, check).colour for check in matrix.checks]
    return {colour: found.count(colour) for colour in Colour}


def verdicts(finding: Finding) -> str:
    if finding.claim is None or finding.paper is None:
        return finding.status.value
    known = " (known)" if finding.status is Status.XFAIL else ""
    return f"claim {finding.claim.value}, paper {finding.paper.value}{known}"
