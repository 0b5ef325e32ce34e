"""A results file in which every text that may be a stranger's is an attack: on HTML, on Markdown, on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerobench.record import Comparison, Failure, Holding, Piece
from zerobench.store import StoreError, read
from zerobench.tests.faults.mutate import dumped, lines_of
from zerobench.tests.made import CASE, record
from zerobench.tests.pages import CHECKS, HOSTILE, about

MARKDOWN = (
    "![i](http://example.invalid/i.png) [x](javascript:alert(1)) <https://example.invalid/a> https://example.invalid/b "
    "www.example.invalid someone@example.invalid @octocat #12 GH-12 $x^2$ | a | `b` ``c`` ~~d~~ **e** _f_ &lt;g&gt; "
    "<b>h</b> [^1] \\ \\| \n\n# heading\n- item\n> quote\n```\nfence\n"
)
ATTACK = f"{HOSTILE} {MARKDOWN}"
MEANT = (
    "scenario",
    "phase",
    "moment",
    "kind",
    "dtype",
    "status",
    "id",
    "provenance",
    "check",
    "checks",
    "started",
    "device",
)
"""Keys whose words decide what the rest means: another word is another record, and not the same one with another name."""


def write(path: Path) -> int:
    """Write the file; how many texts are attacks. What the reader takes nowhere but as it is stays as it is."""
    other = replace(CASE, model="mlp-tiny", options={"mode": "fast"})
    made = about((CASE, other), checks=(*CHECKS, "numerics.tied"))
    records = [record(scenario, CASE) for scenario in ("plain", "dyadic", "timed", "tied")]
    failure = Failure("raised", ATTACK, phase=ATTACK, step=1, stack=ATTACK, last_call=ATTACK)
    broken = record("plain", other, change=lambda s: replace(s, failure=failure), status="error", reason=ATTACK)
    wrong = Comparison(2, "gradient", "a", 150, 3, 1.0, 9.0, 9.0, note=ATTACK)
    records[1] = record("dyadic", CASE, change=lambda s: replace(s, comparisons=(*s.comparisons, wrong)))
    records[3] = replace(records[3], status="skip", reason=ATTACK)
    piece = Piece(400, "aten.empty", ATTACK)
    records[0] = record("plain", CASE, change=lambda s: replace(s, holdings=tuple(_more(h, piece) for h in s.holdings)))
    known = [{"check": "memory.at_rest", "reason": ATTACK}]
    made = replace(
        made, environment={ATTACK: ATTACK}, hosts=(ATTACK,), driver=ATTACK, commit=ATTACK, xfail=tuple(known)
    )
    lines, count = lines_of(made, [*records, broken, record("timed", other)]), 0
    for word in sorted({pair for line in lines for pair in _texts(line)}):
        tried = [_with(line, word) for line in lines]
        path.write_text("".join(dumped(line) + "\n" for line in tried))
        try:
            read(path)
        except StoreError:
            continue
        lines, count = tried, count + 1
    path.write_text("".join(dumped(line) + "\n" for line in lines))
    return count


def _more(holding: Holding, piece: Piece) -> Holding:
    """A holding with a piece that nobody claims."""
    more = holding.live + piece.nbytes
    return replace(holding, live=more, unclaimed=piece.nbytes, pieces=(piece,), claimed={**holding.claimed, ATTACK: 8})


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _texts(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value, key)
    elif isinstance(tree, str) and key not in MEANT and tree != ATTACK:
        yield key, tree


def _with(tree: Any, word: tuple[str, str], key: str = "") -> Any:
    """`tree` with the text `word[1]` under the key `word[0]` exchanged for the attack, wherever it stands."""
    if isinstance(tree, dict):
        return {name: _with(value, word, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_with(value, word, key) for value in tree]
    return f"{ATTACK} {tree}" if (key, tree) == word else tree


def markdown_faults(text: str) -> list[str]:
    """What of a stranger's text would be more than text on GitHub: elements, links, mentions, torn tables, headings."""
    wrong, columns = [], 0
    for line in text.splitlines():
        bare = re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "CODE", line)  # a code span has nothing in it but text
        bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", bare)  # what is escaped stands for itself
        bare = re.sub(r"</?(?:details|summary)>", "", bare)
        for pattern in (
            r"[<>\[\]]",
            r"(?<![A-Za-z0-9])@\w",
            r"@\w\S*\.\w",
            r"://",
            r"\bwww\.",
            r"(?:^|[^&])#\d",
            r"`",
            r"&",
            r"\$",
        ):
            if found := re.search(pattern, bare):
                wrong.append(f"{pattern}: {bare[max(0, found.start() - 30) : found.end() + 20]!a}")
        bars = line.count("|") - line.count("\\|") if line.startswith("|") else 0
        if bars and columns and bars != columns:
            wrong.append(f"a row of {bars} bars in a table of {columns}: {line[:80]!a}")
        columns = bars
    return wrong
