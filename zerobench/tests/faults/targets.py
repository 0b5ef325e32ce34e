"""What strangers' bytes are given to, and what may come of it: the reader's own exception or exit code, and nothing else.

Each target takes bytes. It raises where something else came: an exception that is not the reader's, a traceback, an
undocumented exit code, a control character on the terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from zerobench.baseline import ByteBaseline
from zerobench.baseline_file import BaselineError
from zerobench.baseline_times import TimeBaseline
from zerobench.cli import parser
from zerobench.commands import COMMANDS
from zerobench.commands_info import known
from zerobench.files import json_line
from zerobench.lines import Reader
from zerobench.loader import BadFile, parse
from zerobench.record import Record
from zerobench.store import read
from zerobench.suite import load, load_xfails
from zerobench.tests.faults.mutate import dumped, made_results, mutated, mutated_text, suites
from zerobench.units import parse_bandwidth, parse_count, parse_nbytes, parse_seconds

XFAILS = "- {implementation: [zero2], world_size: [2, 4], check: traffic.volume, reason: all-reduce}\n"
UNITS = ("7.5e9", "7.5B", "24 960", "80GB", "80 GiB", "100GB/s", "1.2 ms", "0.1 kB", "1_000_000", ".5e-3s")
CODES = (0, 1, 2, 3, 4, 5, 6)
CASE_ID = "zero2/gpt-tiny/n4/bf16"


@cache
def folder() -> Path:
    """Gone with the process, where that ends as processes do."""
    made = tempfile.TemporaryDirectory(prefix="zerobench-targets-")
    _kept.append(made)
    return Path(made.name)


_kept: list[Any] = []


_parser = cache(parser)


@cache
def _known() -> Any:
    return known()


def yaml_text(raw: bytes) -> None:
    with contextlib.suppress(BadFile):
        parse(raw)


def suite(raw: bytes) -> None:
    path = folder() / "suite.yaml"
    path.write_bytes(raw)
    with contextlib.suppress(BadFile):
        assert load(path, _known()).cases(), "a suite that is accepted has cases"
    if len(raw) % 16 == 0:  # it asks the installed distributions each time what implementations there are
        told(["validate", str(path)])


def xfails(raw: bytes) -> None:
    path = folder() / "xfails.yaml"
    path.write_bytes(raw)
    with contextlib.suppress(BadFile):
        load_xfails(path)


def record_line(raw: bytes) -> None:
    """Any line to a record, or ValueError with the field; what the fast reader takes is what the codec makes of it."""
    lines = [line + b"\n" for line in raw.split(b"\n")]
    fast = Reader()
    for line in lines * 2:  # again, from what is remembered
        quick = fast.record(line)
        try:
            found = Record.from_json(json_line(line))
        except ValueError:
            assert quick is None, "the fast reader takes what the codec refuses"
            continue
        again = json.dumps(found.to_json(), allow_nan=False)
        assert json.dumps(Record.from_json(json.loads(again)).to_json()) == again
        assert quick is None or json.dumps(quick.to_json()) == again, "the fast reader and the codec differ"


def results(raw: bytes) -> None:
    """The whole way of a results file, as a user goes it: the command is chosen by the file's length."""
    where = folder()
    path = where / "results.jsonl"
    path.write_bytes(raw)
    baselines = _baselines()
    page = str(where / "page")
    commands = (
        ["report", str(path), "--markdown", page, "--json", page],
        ["report", str(path), "--judge", "claim", "--strict"],
        ["matrix", str(path), "--html", page, "-o", page],
        ["explain", str(path), CASE_ID, "--json", page],
        ["compare", str(path), str(baselines)],
        ["history", str(path), str(path), "--since", "2020-01-01"],
        ["accept", str(path), "--baselines", str(where / "accepted"), "--drop"],
    )
    told(commands[len(raw) % len(commands)])
    text = Path(page).read_text() if Path(page).exists() else ""
    assert "<script" not in text.replace("\\<script", "").replace("`", ""), "a page with a stranger's element"


def baseline(raw: bytes) -> None:
    path = folder() / "baseline.json"
    path.write_bytes(raw)
    for load_it in (ByteBaseline.load, TimeBaseline.load):
        with contextlib.suppress(BaselineError):
            load_it(path)
    told(["compare", str(_results()), str(path)])


def units(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    for parse_it in (parse_count, parse_nbytes, parse_bandwidth, parse_seconds):
        with contextlib.suppress(ValueError):
            assert parse_it(text) >= 0


def told(words: list[str]) -> int:
    """The exit code of a command, which says what is wrong without a traceback and without moving the cursor."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        arguments = _parser().parse_args(words)
        code = COMMANDS[arguments.command](arguments)
    said = out.getvalue() + err.getvalue()
    assert code in CODES, f"exit code {code} of {words[0]}"
    assert said.strip() or code == 0, f"exit code {code} of {words[0]}, and not a word"
    assert "own fault" not in said, said[said.index("own fault") - 20 :][:300]
    _readable(said)
    return code


def _readable(said: str) -> None:
    wild = [c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs") and c not in "\n\t"]
    assert not wild, f"characters {wild[:5]!a} on the terminal"


@cache
def _results() -> Path:
    path = folder() / "right.jsonl"
    path.write_text("".join(dumped(line) + "\n" for line in made_results()))
    return path


@cache
def _baselines() -> Path:
    where = folder() / "baselines"
    told(["accept", str(_results()), "--bytes", "--baselines", str(where)])
    TimeBaseline.of(read(_results())).save(where / "times.json")
    return where


def _files() -> list[str]:
    return [(_baselines() / name).read_text() for name in ("bytes/made.json", "times.json")]


def _lines(text: str, chance: random.Random) -> str:
    """A results file with one line changed, or with its lines in another order."""
    lines = [json.loads(line) for line in text.splitlines()]
    at = chance.randrange(len(lines)) if lines else 0
    if lines and chance.random() < 0.9:
        lines[at] = mutated(lines[at], chance)
    else:
        chance.shuffle(lines)
    return "".join(dumped(line) + "\n" for line in lines)


def _tree(text: str, chance: random.Random) -> str:
    return dumped(mutated(json.loads(text), chance))


Change = Callable[[str, random.Random], str]
TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[str]], Change]] = {
    "yaml": (yaml_text, suites, mutated_text),
    "suite": (suite, suites, mutated_text),
    "xfails": (xfails, lambda: [XFAILS], mutated_text),
    "record": (record_line, lambda: [dumped(line) for line in made_results()], _tree),
    "results": (results, lambda: ["".join(dumped(line) + "\n" for line in made_results())], _lines),
    "baseline": (baseline, _files, _tree),
    "units": (units, lambda: list(UNITS), mutated_text),
}
"""By name: what is given bytes, files that are right, and how one of those is changed by somebody who knows its form."""


def changed(name: str, raw: bytes, chance: random.Random) -> bytes:
    """`raw` changed by its form where it has one; as it is where it has none."""
    try:
        return TARGETS[name][2](raw.decode(), chance).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return raw


def seeds(name: str) -> Iterator[bytes]:
    yield from (text.encode() for text in TARGETS[name][1]())
