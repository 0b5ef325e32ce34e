"""The conformance matrix as Markdown: a table that a diff can be read of, and every cell that is not green in full."""

from __future__ import annotations

import re

from zerobench.checks.catalogue import CHECKS
from zerobench.finding import Finding, Level
from zerobench.report.matrix import MEANING, Colour, Matrix, counts, verdicts
from zerobench.report.text import clean

SHOWN = 3
"""Findings of a cell that are written out; the rest are counted."""


def markdown_lines(matrix: Matrix) -> list[str]:
    """Lines of a whole document, without line ends."""
    lines = ["# Conformance", "", "Made by `zerobench matrix` from records; not edited by hand.", ""]
    lines += [f"- {escape(line)}" for line in matrix.made_with()]
    lines += ["", *(f"- `{colour.value}` {meaning}" for colour, meaning in MEANING.items()), ""]
    lines += [*(f"- {escape(line)}" for line in matrix.caveats()), ""] if matrix.shims else []
    lines += [*_table(matrix), ""]
    for colour in (Colour.RED, Colour.AMBER, Colour.DOUBT):
        lines += _cells(matrix, colour)
    return lines + _greys(matrix)


def _table(matrix: Matrix) -> list[str]:
    names = matrix.implementations
    lines = [
        "| check | " + " | ".join(escape(matrix.head(name)) for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for check in matrix.checks:
        level = "" if CHECKS[check].level is Level.MUST else f" ({CHECKS[check].level.value})"
        cells = [matrix.cell(name, check) for name in names]
        words = [f"**{c.colour.value}**" if c.colour is Colour.RED else c.colour.value for c in cells]
        lines.append(f"| {check}{level} | " + " | ".join(words) + " |")
    sums = [counts(matrix, name) for name in names]
    for colour in (Colour.GREEN, Colour.AMBER, Colour.RED, Colour.GREY):
        lines.append(f"| *{colour.value}* | " + " | ".join(str(s[colour]) for s in sums) + " |")
    return lines


def _cells(matrix: Matrix, colour: Colour) -> list[str]:
    lines = []
    for name in matrix.implementations:
        for check in matrix.checks:
            cell = matrix.cell(name, check)
            if cell.colour is colour:
                found = cell.telling()
                lines += [
                    f"### {escape(matrix.head(name))}: {check}",
                    "",
                    f"Requirement: {escape(CHECKS[check].requirement)}.",
                    "",
                ]
                for finding in found[:SHOWN]:
                    lines += _finding(matrix, finding)
                if len(found) > SHOWN:
                    lines += [f"And {len(found) - SHOWN} more cases alike.", ""]
    if not lines:
        return []
    return [f"## {colour.value}: {MEANING[colour]}", "", *lines]


def _finding(matrix: Matrix, finding: Finding) -> list[str]:
    lines = [f"- {code(finding.case)}: {verdicts(finding)}"]
    if finding.expected:
        lines.append(f"  - expected: {escape(finding.expected)}")
    lines.append(f"  - actual: {escape(finding.actual)}")
    lines += [f"  - {escape(line)}" for line in finding.detail if line.startswith("known: ")]
    return [*lines, f"  - again: {code(matrix.command(finding))}", ""]


def _greys(matrix: Matrix) -> list[str]:
    lines = [f"## {Colour.GREY.value}: {MEANING[Colour.GREY]}", ""]
    for name in matrix.implementations:
        for reason, checks in matrix.grey(name).items():
            lines.append(f"- {escape(name)}: {', '.join(checks)}: {escape(reason)}")
    return [*lines, ""]


def code(text: str) -> str:
    """`text` as a code span, which has no escapes: its fence is longer than any run of backticks within."""
    one_line = " ".join(clean(text).split()) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", one_line)), default=0))
    return f"{fence} {one_line} {fence}" if len(fence) > 1 else f"`{one_line}`"


def escape(text: str) -> str:
    """`text` as Markdown that reads as it stands, on one line, wherever it is put.

    GitHub makes links of bare addresses and of names after "@", of issues after "#", and no backslash stops it: there an
    invisible word joiner parts what would be recognised. In a run's id ("n4/bf16@plain") nothing is, and it stays as it is.
    """
    one_line = " ".join(clean(text).split())
    one_line = _LINKS.sub(lambda found: found[0] + _JOINER, one_line)
    one_line = re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", one_line)
    return re.sub(r"^(\d*)([-+=.)])(?=[-=]*(?:\s|$))", r"\1\\\2", one_line)  # a list's mark, a rule, an underline


def cell(text: str) -> str:
    """`text` as a code span in a cell of a table, or as `escape` has it where a code span cannot be: a bar ends the cell
    there too."""
    return escape(text) if re.search(r"[|\\`]", text) else code(text)


_JOINER = "\u2060"
_LINKS = re.compile(
    r"(?<![A-Za-z0-9])@|@(?=\S*\.\w)|:(?=//)|\bwww(?=\.)|\b(?:mailto|xmpp)(?=:)|#(?=\d)|\bGH(?=-\d)", re.IGNORECASE
)
