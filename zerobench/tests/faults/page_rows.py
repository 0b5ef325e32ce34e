"""A results file whose every text is an attack, given to the commands that show it: a page, Markdown, a chart, a terminal.

What a browser makes of the page is in `test_browser.py`; here are the files and the streams that a user gets.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec

from zerobench.report.run_markdown import SUMMARY
from zerobench.tests.faults.bench import Bench
from zerobench.tests.faults.hostile_results import ATTACK, markdown_faults, write
from zerobench.tests.faults.mutate import dumped, made_results
from zerobench.tests.faults.row import NotHere, Row, Wrong

LEAST_ATTACKS = 30
SHOWN_ELEMENTS = ("script", "img", "iframe", "object", "form", "base", "link", "a")
FORGED = re.compile(r"^(?:# heading|- item|> quote|```|fence|new)", re.MULTILINE)
"""How a line of the attack begins: none may begin a line of ours."""


def rows() -> list[Row]:
    def row(name: str, done: str, act: Callable[[Bench], str], quick: bool = False) -> Row:
        return Row("hostile results", name, done, "the texts, as texts", act, quick)

    return [
        row("the terminal", "report, explain and history print them", _terminal),
        row("the pages", "report and matrix write HTML of them", _pages),
        row("Markdown", "report and matrix write Markdown of them; GitHub is asked to show it", _markdown, True),
        row("a chart", "explain draws them", _chart),
    ]


def _made(bench: Bench) -> Bench:
    alone = bench.apart("hostile")
    if (count := write(alone.folder / "r.jsonl")) < LEAST_ATTACKS:
        raise AssertionError(f"only {count} texts of the file are attacks")
    return alone


def _told(bench: Bench, *words: str, codes: tuple[int, ...] = (0, 1, 3), env: dict[str, str] | None = None) -> str:
    code, out, err = bench.run(*words, env=env)
    said = out + err
    if code not in codes or "Traceback" in said or "own fault" in said:
        raise Wrong("not told", f"zerobench {' '.join(words)}: exit code {code}: {said[-900:]}")
    if wild := {c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n"}:
        raise Wrong("not told", f"zerobench {' '.join(words)}: on the terminal: {sorted(wild)!a}")
    if forged := FORGED.search(said):
        raise Wrong("not told", f"zerobench {' '.join(words)}: a line that is not ours: {forged[0]!r}")
    return said


def _terminal(bench: Bench) -> str:
    alone = _made(bench)
    said = _told(alone, "report", "r.jsonl")
    if "window.stolen = 1" not in said:
        raise Wrong("not told", "the texts are not shown at all")
    _told(alone, "explain", "r.jsonl", "gpt-tiny")
    _told(alone, "explain", "r.jsonl", "no such case", codes=(2,))
    _told(alone, "history", "r.jsonl", "r.jsonl")
    _told(alone, "accept", "r.jsonl", codes=(2,))
    return "every control character and every turn of direction spelled out"


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [value or "" for name, value in attrs if name in ("href", "src", "action")]
        inward = all(link.startswith(("#", "data:,")) for link in links)
        if (
            (tag in SHOWN_ELEMENTS and not (links and inward))
            or not inward
            or any(n.startswith("on") for n, _ in attrs)
        ):
            self.wrong.append(f"<{tag} {attrs}"[:120])


def _pages(bench: Bench) -> str:
    alone = _made(bench)
    names = ["matrix.html"]
    _told(alone, "matrix", "r.jsonl", "--html", "matrix.html")
    if find_spec("matplotlib"):
        _told(alone, "report", "r.jsonl", "--html", "report.html")
        names.append("report.html")
    for name in names:
        reader = _Elements()
        reader.feed((alone.folder / name).read_text(encoding="utf-8"))
        if reader.wrong:
            raise Wrong("not told", f"{name}: {reader.wrong[:3]}")
    return f"{', '.join(names)}: no script, no request, no element of the stranger's"


def _markdown(bench: Bench) -> str:
    alone = _made(bench)
    _told(alone, "report", "r.jsonl", "--markdown", "report.md")
    names = ["report.md"]
    if bench.whole:  # a suite's name becomes part of a path: there an attack is refused, and the others come through
        _told(alone, "matrix", "r.jsonl", "--output", "matrix.md")
        text = (alone.folder / "r.jsonl").read_text()
        suite = re.search(r'"suite":("(?:[^"\\]|\\.)*")', text)
        assert suite and ATTACK[:20] in suite[1]
        (alone.folder / "named.jsonl").write_text(text.replace(f'"suite":{suite[1]}', '"suite":"made"'))
        (alone.folder / "right.jsonl").write_text("".join(dumped(line) + "\n" for line in made_results()))
        _told(alone, "accept", "named.jsonl", "--bytes", codes=(2,))
        _told(alone, "accept", "right.jsonl", "--bytes", codes=(0,))
        env = {SUMMARY: str(alone.folder / "summary.md")}
        _told(alone, "compare", "named.jsonl", "--bytes", codes=(4,), env=env)
        names += ["matrix.md", "summary.md"]
    for name in names:
        if wrong := markdown_faults((alone.folder / name).read_text(encoding="utf-8")):
            raise Wrong("not told", f"{name}: {wrong[:3]}")
    return f"{', '.join(names)}: no element, no link, no mention, and tables of whole rows"


def _chart(bench: Bench) -> str:
    if not find_spec("matplotlib"):
        raise NotHere("matplotlib is not installed")
    alone = _made(bench)
    _told(alone, "explain", "r.jsonl", "gpt-tiny", "--chart", "c.svg")
    if "<script" in (alone.folder / "c.svg").read_text(encoding="utf-8"):
        raise Wrong("not told", "an element of the stranger's in the chart")
    return "names with dollar signs and angle brackets are names"
