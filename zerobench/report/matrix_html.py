"""The conformance matrix as one HTML page: a table whose cells open their findings. No script, nothing from elsewhere.

Everything that comes from a record is escaped: names and messages are a stranger's.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape as _escape

from zerobench.checks.catalogue import CHECKS
from zerobench.finding import Finding, Level
from zerobench.report.matrix import MEANING, Cell, Matrix, colour_of, verdicts
from zerobench.report.text import clean

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem; color: #1b1f24; background: #fff; }
table { border-collapse: collapse; } thead th { position: sticky; top: 0; background: #fff; }
th, td { border: 1px solid #d0d7de; padding: .2rem .5rem; text-align: left; font-weight: normal; vertical-align: top; }
tbody th { position: sticky; left: 0; background: #fff; }
td a { color: inherit; display: block; } code, pre { font: 13px/1.4 ui-monospace, monospace; } pre { overflow-x: auto; }
.GREEN { background: #d8f3dc; } .AMBER { background: #ffe8b3; } .RED { background: #ffc9c9; font-weight: bold; }
.GREY { background: #eceff1; color: #57606a; } .DOUBT { background: #dbe4ff; }
section { border-top: 1px solid #d0d7de; margin-top: 1.2rem; } section:target { background: #f6f8fa; }
dt { color: #57606a; } dd { margin: 0 0 .3rem 1.5rem; }
"""


def html_page(matrix: Matrix) -> str:
    """A whole page. Its sections are named after implementation and check, so that a cell can be linked to."""
    sources = "".join(f"<li>{escape(line)}</li>" for line in matrix.made_with())
    legend = "".join(
        f'<li><span class="{c.name}">&nbsp;{escape(c.value)}&nbsp;</span> {m}</li>' for c, m in MEANING.items()
    )
    legend += "".join(f"<li>{escape(line)}</li>" for line in matrix.caveats())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>zerobench: conformance</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n'
        "<h1>Conformance</h1><p>Made by <code>zerobench matrix</code> from records; not edited by hand.</p>"
        f"<ul>{sources}</ul><ul>{legend}</ul>\n{matrix_table(matrix, _anchor)}\n{_sections(matrix)}</body></html>\n"
    )


def matrix_table(matrix: Matrix, anchor: Callable[[str, str], str]) -> str:
    """Implementation by check, each cell a link to #anchor(implementation, check); `anchor` gives what is escaped."""
    heads = "".join(f'<th scope="col">{escape(matrix.head(name))}</th>' for name in matrix.implementations)
    rows = []
    for check in matrix.checks:
        row = CHECKS[check]
        level = "" if row.level is Level.MUST else f" ({row.level.value})"
        cells = "".join(_td(anchor(name, check), matrix.cell(name, check)) for name in matrix.implementations)
        rows.append(f'<tr><th scope="row" title="{escape(row.requirement)}">{check}{level}</th>{cells}</tr>')
    return f'<table><thead><tr><th scope="col">check</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _td(anchor: str, cell: Cell) -> str:
    word = escape(cell.colour.value)
    return f'<td class="{cell.colour.name}"><a href="#{anchor}">{word}</a></td>'


def _sections(matrix: Matrix) -> str:
    return "\n".join(
        f'<section id="{_anchor(name, check)}"><h2>{escape(matrix.head(name))}: {check}</h2>'
        f"<p>{escape(CHECKS[check].requirement)}</p>"
        + "".join(_finding(matrix, f) for f in matrix.cell(name, check).findings.values())
        + "</section>"
        for name in matrix.implementations
        for check in matrix.checks
    )


def _finding(matrix: Matrix, finding: Finding) -> str:
    colour = colour_of(finding)
    rows = [("expected", finding.expected), ("actual", finding.actual), *(("", line) for line in finding.detail)]
    said = "".join(f"<dt>{what}</dt><dd>{escape(text)}</dd>" for what, text in rows if text)
    return (
        f'<p><span class="{colour.name}">&nbsp;{escape(verdicts(finding))}&nbsp;</span> '
        f"<code>{escape(finding.case)}</code></p><dl>{said}</dl><pre>{escape(matrix.command(finding))}</pre>"
    )


def _anchor(name: str, check: str) -> str:
    return escape(f"{name}:{check}")


def escape(text: str) -> str:
    """`text` for a page, between tags or in an attribute."""
    return _escape(clean(text), quote=True)
