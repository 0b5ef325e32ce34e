"""The three spellings, and every way in which a plug-in is refused."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerobench.claims import Claims
from zerobench.implementations import registry
from zerobench.implementations.registry import (
    BadPlugin,
    absolute,
    check_engine,
    names,
    resolve,
)
from zerobench.terms import Stage

GOOD = """
from dataclasses import dataclass
import sibling_{mark}

@dataclass
class Zero:
    name: str = "my-zero"
    def unavailable(self): return sibling_{mark}.reason()
    def claims(self, job): ...
    def build(self, job): import later_{mark}

made = Zero("made")
def function(): ...
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., str]:
    """Writes a plug-in file and its siblings; returns its path. Module names are new each time: sys.modules lasts."""

    def write(text: str = GOOD) -> str:
        mark = uuid.uuid4().hex[:8]
        (tmp_path / f"sibling_{mark}.py").write_text("def reason(): return 'no luck'")
        (tmp_path / f"later_{mark}.py").write_text("")
        path = tmp_path / f"mine_{mark}.py"
        path.write_text(text.replace("{mark}", mark))
        return str(path)

    return write


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution that registers entry points."""

    def install(distribution: str, version: str = "1.2", **points: str) -> None:
        info = tmp_path / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        rows = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{rows}")

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def refused(reference: str) -> str:
    with pytest.raises(BadPlugin) as caught:
        resolve(reference)
    return str(caught.value)


def test_a_file_finds_its_siblings_now_and_later_and_is_pickled(plugin: Callable[..., str]) -> None:
    path = plugin()
    found: Any = resolve(f"{path}:Zero")
    assert (found.name, found.unavailable()) == ("my-zero", "no luck")
    found.build(None)
    assert pickle.loads(pickle.dumps(found)) == found
    assert resolve(f"{path}:made").name == "made"


def test_a_module_and_an_entry_point(plugin: Callable[..., str], installed: Callable[..., None]) -> None:
    module = Path(plugin()).stem
    installed("fast-zero", **{"fast": f"{module}:Zero"})
    assert resolve(f"{module}:Zero") == resolve("fast")
    assert [(e.value, e.distribution, e.version) for e in names() if e.name == "fast"] == [
        (f"{module}:Zero", "fast-zero", "1.2")
    ]


def test_a_broken_plug_in_names_its_distribution_and_hides_no_other(
    plugin: Callable[..., str], installed: Callable[..., None]
) -> None:
    broken, good = plugin("import os\nos.no_such_thing\n"), plugin()
    installed("bad-zero", "0.9", bad=f"{Path(broken).stem}:Zero", fine=f"{Path(good).stem}:Zero")
    text = refused("bad")
    assert "'bad'" in text and "bad-zero 0.9" in text and "AttributeError" in text and f"{broken}:2" in text
    assert resolve("fine").name == "my-zero"


def test_one_name_from_two_distributions(plugin: Callable[..., str], installed: Callable[..., None]) -> None:
    installed("one", twin="a:B")
    installed("two", "2.0", twin="c:D")
    assert re.search(r"registered twice, by one 1\.2 \(a:B\) and two 2\.0 \(c:D\)", refused("twin"))


def test_an_unknown_name_gets_the_nearest_spelling(installed: Callable[..., None]) -> None:
    installed("some", **{"zero-fast": "a:B"})
    text = refused("zero-fats")
    assert "unknown implementation 'zero-fats' (did you mean 'zero-fast'?)" in text and "known: " in text


METHODS = "    def unavailable(self): ...\n    def claims(self, job): ...\n    def build(self, job): ...\n"


@pytest.mark.parametrize(
    ("text", "attribute", "wrong"),
    [
        (GOOD, "Zerro", "has no 'Zerro' (did you mean 'Zero'?)"),
        (GOOD, "function", "is a function, not a class"),
        ("Zero = 3", "Zero", "is a int, not a class"),
        ("class Zero:\n    def claims(self, job): ...", "Zero", "lacks unavailable(), build()"),
        ("class Zero:\n" + METHODS, "Zero", "needs a name of [a-z0-9-]+, which stands in ids; it has None"),
        ("class Zero:\n    name = 'My Zero'\n" + METHODS, "Zero", "it has 'My Zero'"),
        (
            "class Zero:\n    def __init__(self, world): ...\n" + METHODS,
            "Zero",
            "Zero() cannot be made without arguments",
        ),
        (
            "class Zero:\n    name = 'x'\n" + METHODS.replace("build(self, job)", "build(self)"),
            "Zero",
            "build() cannot be called as build(...): too many positional arguments",
        ),
        ("def broken(:", "Zero", "cannot be imported: SyntaxError"),
        ("import no_such_package_anywhere", "Zero", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("raise SystemExit(3)", "Zero", "cannot be imported: SystemExit: 3"),
    ],
)
def test_refusals(plugin: Callable[..., str], text: str, attribute: str, wrong: str) -> None:
    path = plugin(text)
    said = refused(f"{path}:{attribute}")
    assert wrong in said and path in said


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        ("/nowhere/mine.py:Zero", "there is no file /nowhere/mine.py"),
        ("no_such_package_anywhere.part:Zero", "cannot be imported: ModuleNotFoundError"),
        ("zerobench.terms:", "expected a name, package.module:Class or path/to/file.py:Class"),
    ],
)
def test_references_that_lead_nowhere(reference: str, wrong: str) -> None:
    assert wrong in refused(reference)


def test_only_a_files_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("./mine.py:Zero") == f"{tmp_path.resolve()}/mine.py:Zero"
    assert absolute("package.module:Zero") == "package.module:Zero"
    assert absolute("zero2") == "zero2"


class Engine:
    def forward(self, batch: Any, *, last: bool) -> None: ...
    def backward(self, loss: Any, *, last: bool) -> None: ...
    def step(self) -> None: ...
    def model_states(self) -> None: ...
    def full_parameters(self) -> None: ...
    def close(self) -> None: ...


def test_an_engine_needs_its_methods_and_those_it_announces() -> None:
    plain = Claims(Stage.DDP)
    check_engine(Engine(), plain)
    with pytest.raises(
        BadPlugin, match=r"announce what it lacks: save\(\) \('checkpoint'\), load\(\) \('checkpoint'\)"
    ):
        check_engine(Engine(), Claims(Stage.DDP, supports=frozenset({"checkpoint"})))
    with pytest.raises(BadPlugin, match=r"builtins.object lacks forward\(\), backward\(\)"):
        check_engine(object(), plain)

    class Old(Engine):
        def forward(self, batch: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(BadPlugin, match=r"forward\(batch: .*cannot be called as forward\(\.\.\., last=\.\.\.\)"):
        check_engine(Old(), plain)


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, zerobench.implementations.registry as r; r.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
