"""Files that are nearly right: what reads them says what is wrong, or reads them, and nothing else ever happens.

`tox -e fuzz` searches longer, and by coverage; what it or this has found is among the cases at the end.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerobench
from zerobench.files import json_line, opened
from zerobench.report import matrix_markdown, text
from zerobench.store import StoreError, read
from zerobench.tests.faults.hostile_results import MARKDOWN, markdown_faults
from zerobench.tests.faults.mutate import dumped, made_results
from zerobench.tests.faults.targets import TARGETS, changed, seeds

PACKAGE = Path(zerobench.__file__).parent
CHEAP = {"yaml": 60, "suite": 40, "xfails": 150, "record": 60, "results": 25, "baseline": 40, "units": 200}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right_is_read_or_refused(name: str) -> None:
    right = list(seeds(name))

    @settings(max_examples=CHEAP[name], deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(right), st.integers(0, 2**32))
    def holds(raw: bytes, seed: int) -> None:
        TARGETS[name][0](changed(name, raw, random.Random(seed)))

    holds()


def test_what_is_right_is_taken() -> None:
    """Else the test above would pass with readers that refuse everything."""
    for name, (target, _, _) in TARGETS.items():
        for raw in seeds(name):
            target(raw)
    for line in made_results():
        assert json_line(dumped(line).encode()) == line


@pytest.mark.parametrize(
    ("at", "change", "said"),
    [
        (1, lambda r: r["claims"].update(supports=["bucket", 7]), "claims.supports"),
        (1, lambda r: r.update(claims=[1]), "record.claims"),
        (1, lambda r: r["claims"].update(padding_numel="2"), "Claims.padding_numel"),
        (3, lambda r: r["launch"]["times_s"][2].pop(), "different numbers of steps"),
        (3, lambda r: r["launch"]["times_s"].__setitem__(0, ["nan"] * 7), "not a positive number of seconds"),
        (1, lambda r: r["run"]["case"].update(options={"x": {"y": 1}}), "options.x: a dict"),
        (0, lambda r: r.update(cases=[{"implementation": 1}]), r"provenance.cases\[0\]"),
        (0, lambda r: r.update(started="yesterday"), "provenance.started"),
    ],
)
def test_what_no_run_writes_is_refused_where_it_stands(at, change, said, tmp_path) -> None:
    lines = made_results()
    change(next(iter(lines[at].values())))
    path = tmp_path / "r.jsonl"
    path.write_text("".join(dumped(line) + "\n" for line in lines))
    with pytest.raises(StoreError, match=rf"r\.jsonl:{at + 1}: .*{said}"):
        read(path)


def test_times_of_a_run_that_no_case_has_are_told_as_such(tmp_path: Path) -> None:
    """A results file may have records of cases that its provenance does not name."""
    lines = made_results()
    case = lines[0]["provenance"]["cases"][0]
    case["model"] = "mlp-tiny"
    TARGETS["results"][0]("".join(dumped(line) + "\n" for line in lines).encode())
    for pad in range(7):  # the command is chosen by the length
        TARGETS["results"][0](("".join(dumped(line) + "\n" for line in lines) + " " * pad).encode())


def test_a_pipe_a_device_and_a_folder_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "pipe", "."):
        with pytest.raises(OSError):
            opened(tmp_path / name)
        with pytest.raises(StoreError, match="cannot be read: "):
            read(tmp_path / name)


def test_markdown_makes_no_link_no_mention_and_no_cell_of_a_strangers_text() -> None:
    for made in (matrix_markdown.escape(MARKDOWN), matrix_markdown.code(MARKDOWN), matrix_markdown.code("")):
        assert markdown_faults(made) == []
    assert markdown_faults(f"| a | {matrix_markdown.cell(MARKDOWN)} |\n| a | {matrix_markdown.cell('b')} |") == []
    assert matrix_markdown.cell("a|b`c") == "a\\|b\\`c" and matrix_markdown.cell("n4/bf16@plain") == "`n4/bf16@plain`"
    assert matrix_markdown.escape("n4/bf16@plain") == "n4/bf16@plain"
    assert matrix_markdown.escape("- a") == "\\- a" and matrix_markdown.escape("2. a") == "2\\. a"
    assert matrix_markdown.escape("-8 B, +510 kB and 2.00 Psi") == "-8 B, +510 kB and 2.00 Psi"
    for raw in ("<b>", "[x](y)", "@octocat", "a@b.example", "http://x.example", "www.x.example", "#12", "`"):
        assert markdown_faults(raw), f"the test itself passes over {raw}"


def test_a_name_adds_no_line_and_moves_nothing() -> None:
    assert text.on_line("a\nFAIL b\t\x1b[2J\u202e") == "a\\nFAIL b\\t\\x1b[2J\\u202e"
    assert text.below("one\ntwo", 2) == "one\n  two"


REASONS = {"lines.py": "exec"}
"""Own calls that run code. lines.py: of the names of our own dataclasses' fields a function is written out, as dataclasses
does it; nothing of a file goes into it."""


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text())
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_but_a_named_plug_in_ever_runs_code() -> None:
    """Over the package's own source: no pickle, no eval, no loader of YAML that constructs; checkpoints by weights_only."""
    sources = [path for path in PACKAGE.rglob("*.py") if "tests" not in path.relative_to(PACKAGE).parts]
    assert len(sources) > 100
    wrong = []
    for path in sources:
        name = path.relative_to(PACKAGE).as_posix()
        code = path.read_text()
        for call, node in _calls(path):
            last = call.rpartition(".")[2]
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if call == "torch.load" and keywords.get("weights_only") != "True":
                wrong.append(f"{name}:{node.lineno}: torch.load without weights_only=True")
            runs = call in ("eval", "exec", "compile", "os.system") or keywords.get("shell") == "True"
            if runs and REASONS.get(name) != call:
                wrong.append(f"{name}:{node.lineno}: {call}")
            if call.startswith("yaml.") and last.startswith(("load", "unsafe", "full_load")):
                wrong.append(f"{name}:{node.lineno}: {call}")
            if last in ("load", "load_checkpoint") and call.startswith(("dcp.", "self.engine.load_c")):
                before = "\n".join(code.splitlines()[max(0, node.lineno - 6) : node.lineno])
                if "this run's own" not in before:
                    wrong.append(f"{name}:{node.lineno}: {call} unpickles, and no reason is given")
        if found := re.search(
            r"^\s*(?:import|from) (?:pickle|dill|cloudpickle|marshal|shelve|joblib)\b", code, re.MULTILINE
        ):
            wrong.append(f"{name}: {found[0].strip()}")
    assert not wrong, "\n".join(wrong)


def test_the_strict_reader_of_json_says_where() -> None:
    assert json_line(b'{"a": [1, -2, 1.5, 18446744073709551615, "12345678901234567890123"]}\n')["a"][3] == 2**64 - 1
    for line, said in (
        (b'{"a": 1, "a": 2}', "'a' stands there twice"),
        (b'{"a": 18446744073709551616}', "more than 64 bits"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes, at character 2"),
        (b'{"a": "\xe9"}', "byte 0xe9 at 8 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            json_line(line)
    assert json.loads(json.dumps({"a": 2**64 - 1}))["a"] == 2**64 - 1
