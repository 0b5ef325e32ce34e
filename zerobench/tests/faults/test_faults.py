"""The quick part of the fault matrix; `tox -e faults` tries the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerobench.tests.faults import bench as bench_module
from zerobench.tests.faults.bench import Bench
from zerobench.tests.faults.matrix import counts, markdown, rows
from zerobench.tests.faults.row import Result, Row, Wrong, tried

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]  # minutes only on a machine with much else to do
QUICK = [row for row in rows() if row.quick]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("faults") / "bench") as bench:
        yield bench


@pytest.mark.parametrize("row", QUICK, ids=[f"{row.chapter}: {row.name}" for row in QUICK])
def test_a_fault_is_survived(row: Row, bench: Bench) -> None:
    result = tried(row, bench)
    if result.skipped:
        pytest.skip(result.seen)
    assert not result.wrong, result.seen


def test_what_goes_wrong_is_counted_and_shown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver itself: a row that loses a case, one that is skipped, one that leaves a file."""

    def loses(_: Bench) -> str:
        raise Wrong("case lost", "a | b <script>\x1b[2J")

    def leaves(bench: Bench) -> str:
        (bench.temporary / "forgotten").touch()
        return "nothing"

    lost = tried(Row("a rank", "loses", "", "", loses), bench)
    monkeypatch.setattr(bench_module, "GONE_S", 0.0)
    forgot = tried(Row("a rank", "leaves", "", "", leaves), bench)
    (bench.temporary / "forgotten").unlink()
    assert lost.wrong == ("case lost",) and forgot.wrong == ("file left",)
    skipped = Result(Row("a rank", "skipped", "", "", loses), "not tried: no root", skipped=True)
    sums = counts([lost, forgot, skipped])
    assert (sums["tried"], sums["survived"], sums["case lost"], sums["file left"]) == (2, 0, 1, 1)
    page = "\n".join(markdown([lost, forgot, skipped], 60.0, 144))
    assert "3 of the matrix's 144 rows" in page
    assert "| 2 | 0 | 1 | 0 | 1 | 0 | 0 | 1 |" in page and "<script>" not in page and "\x1b" not in page
