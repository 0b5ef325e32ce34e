"""pytest: a suite is a test file, a case its class, a finding its test: `pytest suites/smoke.yaml -k "zero2 and n2"`.

Loaded in every pytest run of an environment that has zerobench, so it costs others nothing: no torch, no pandas, no
pydantic until a suite is at hand, and a YAML file is taken for one only where somebody named it or it lies in a folder
`suites`, and its top keys are a suite's.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zerobench.pytest_session import Session

SNIFFED_NBYTES = 64 << 10
_VERSION = re.compile(rb"^version\s*:", re.MULTILINE)
_SUITE = re.compile(rb"^suite\s*:", re.MULTILINE)

SESSION: pytest.StashKey[Session] = pytest.StashKey()
"""What the suites of one pytest run share; there once the first is collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zerobench")
    group.addoption(
        "--zb-baseline", metavar="PATH", help="also compare exact numbers with a baseline: a folder, or its bytes file"
    )
    group.addoption("--zb-strict", action="store_true", help="SHOULD counts as MUST")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "zerobench(check, chapter, level): a finding of a zerobench suite; zerobench sets it on its own items",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix not in (".yaml", ".yml"):
        return None
    named = parent.session.isinitpath(file_path)
    if not (named or file_path.parent.name == "suites") or not _is_suite(file_path):
        return None
    from zerobench.pytest_session import Session
    from zerobench.pytest_suite import SuiteFile

    if SESSION not in parent.config.stash:
        parent.config.stash[SESSION] = Session()
    return SuiteFile.from_parent(parent, path=file_path)


def _is_suite(path: Path) -> bool:
    """Whether the top keys are a suite's, as text: a file that is broken further down is still ours to complain of."""
    from zerobench.files import opened

    try:
        with opened(path) as file:
            head = file.read(SNIFFED_NBYTES)
    except OSError:
        return False
    return bool(_VERSION.search(head) and _SUITE.search(head))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip is shown where the suite asks for the check, not where this package raised it."""
    report = yield
    line = getattr(item, "suite_line", None)
    if line is not None and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(item.path), line + 1, report.longrepr[2])
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """However the run ended; what does not even get here, a kill, ends the ranks by their lifeline."""
    if session := config.stash.get(SESSION, None):
        session.close()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """What one must know to read the files of pytest-benchmark: who measured, and that ranks did."""
    if session := config.stash.get(SESSION, None):
        output_json["zerobench"] = session.about
