"""The fast reader of records: what it shares, what it leaves to the codec, and that work and memory grow with records."""

from __future__ import annotations

import cProfile
import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerobench import cli
from zerobench.case import Case
from zerobench.files import json_line
from zerobench.lines import ROOM_NBYTES, Reader
from zerobench.record import SCHEMA, Failure, Provenance, Record
from zerobench.store import StoreError, Writer, read
from zerobench.tests.made import CASE, record

CHECKS = ("memory.at_rest", "traffic.volume", "time.step")


def line_of(item: Provenance | Record) -> bytes:
    return json.dumps(item.to_json(), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def launch(i: int, case: Case = CASE) -> Record:
    """The i-th launch of a case: other seconds, another count of the allocator."""

    def other(sample: Any) -> Any:
        counts = tuple(h.live + 1000 + i for h in sample.holdings)
        return replace(sample, allocator=counts, times_s=tuple(t + i / 4096 for t in sample.times_s))

    return record(case=case, change=other, suite="many", provenance="p", wall_s=1.5 + i)


def results_file(path: Path, cases: int, launches: int) -> Path:
    each = [replace(CASE, model=f"m{i}") for i in range(cases)]
    about = Provenance("p", "0.1.0", "many", "d", "host", "2026-01-01T00:00:00+00:00", checks=CHECKS)
    about = replace(about, cases=tuple(case.to_json() for case in each), judge="claim")
    lines = [line_of(about)] + [line_of(launch(i, case)) for i in range(launches) for case in each]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(
    "what",
    [
        launch(3),
        record("dyadic"),
        record(
            change=lambda s: replace(s, failure=Failure("died", "of “old age”\n", stack="a\\b"), times_s=(1.0, 25.0))
        ),
        record(status="skip", reason="no", samples=(), claims=None, model=None),
        record(case=replace(CASE, options={"a": 1, "b": None, "c": 0.5, "d": "x"})),
    ],
)
def test_a_line_is_read_as_the_codec_reads_it(what: Record) -> None:
    line, reader = line_of(what), Reader()
    for _ in range(2):
        assert reader.record(line) == Record.from_json(json_line(line)) == what


def test_what_launches_have_in_common_is_there_once() -> None:
    reader = Reader()
    a, b = reader.record(line_of(launch(0))), reader.record(line_of(launch(1)))
    assert a and b and a != b and not reader.new
    assert a.run is b.run and a.claims is b.claims and a.model is b.model
    assert a.samples[0].calls is a.samples[1].calls is b.samples[1].calls  # all ranks issue the same
    assert a.samples[0].holdings is b.samples[0].holdings
    assert a.samples[0].holdings[0].claimed is b.samples[3].holdings[5].claimed
    assert a.samples[0].allocator != b.samples[0].allocator
    assert reader.record(line_of(launch(1, replace(CASE, model="other")))) and reader.new


def test_claims_are_new_until_a_run_that_was_ok_has_made_them() -> None:
    reader = Reader()
    failed = replace(launch(0), status="error", reason="died")
    for what, new in ((failed, True), (failed, False), (launch(0), True), (launch(0), False)):
        assert reader.record(line_of(what)) and reader.new is new


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerobench.lines.ROOM_NBYTES", 20_000)
    assert ROOM_NBYTES >= 1 << 20
    reader = Reader()
    for i in range(200):
        assert reader.record(line_of(launch(i, replace(CASE, model=f"m{i}"))))
    assert sum(len(text) for parts in (*reader._parts, reader._heads) for text in parts) < 25_000
    assert sum(map(len, reader._told)) < 20_000 < len(line_of(launch(0))) * 200


GOOD = line_of(launch(0, replace(CASE, model="m0")))  # as the first record of `results_file`
BODY = json.loads(GOOD)["record"]


def changed(body: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"record": body | more}, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD.replace(b'"wall_s":1.5', b'"wall_s":1.5,"wall_s":2.5'), "'wall_s' stands there twice"),
        (GOOD.replace(b'"numel":1200', b'"numel":1,"numel":1200', 1), "'numel' stands there twice"),
        (GOOD.replace(b'"rank":1', b'"rank":1.0'), "record.samples[1].rank: expected int, got float"),
        (GOOD.replace(b'"rank":1', b'"rank":true'), "record.samples[1].rank: expected int, got bool"),
        (GOOD.replace(b'"wall_s":1.5', b'"wall_s":NaN'), "NaN is not JSON"),
        (GOOD.replace(b'"psi":1200', b'"psi":%d' % 2**70), "more than 64 bits"),
        (GOOD.replace(b'"live":6600', b'"live":%d' % 2**70, 1), "more than 64 bits"),
        (
            GOOD.replace(b'"numel":1200', b'"numel":"1200"', 1),
            "record.samples[0].calls[0].numel: expected int",
        ),
        (GOOD.replace(b'"stage":2', b'"stage":9'), "9 is not a valid Stage"),
        (GOOD.replace(b'"numel":1200', b'"numel":-1', 1), "record.samples[0].calls[0]: a negative number"),
        (GOOD.replace(b'"times_s":[[0.01', b'"times_s":[[-0.01', 1), "record.samples[0].times_s[0]"),
        (
            GOOD.replace(b'"run_s":[0.0,', b'"run_s":['),
            "record.launch.run_s: expected a list of 4, one for each of the samples",
        ),
        (
            GOOD.replace(b'"allocator":[[7600,', b'"allocator":[['),
            "record.samples[0].allocator: 7 counts for 8 holdings",
        ),
        (
            GOOD.replace(b'"allocator":[[7600,', b'"allocator":[["7600",'),
            "record.samples[0].allocator[0]: expected int",
        ),
        (changed(BODY, launch=[]), "record.samples and record.launch are a list and an object"),
        (changed(BODY, launch={}), "record.launch.times_s: expected a list of 4"),
        (changed(BODY, schema=SCHEMA + 1), "upgrade"),
        (changed(BODY, status="fine"), "record.status"),
        (changed(BODY, samples=[*BODY["samples"][:3], BODY["samples"][0]]), "record.samples: ranks [0, 1, 2, 0]"),
    ],
)
def test_a_line_that_is_not_ours_is_refused_with_its_place_also_after_good_ones(
    tmp_path: Path, line: bytes, said: str
) -> None:
    path = results_file(tmp_path / "r.jsonl", 1, 2)
    with path.open("ab") as out:
        out.write(line)
    with pytest.raises(StoreError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:4: ") and said in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"record": BODY | {"later": {"a": [1]}}}).encode() + b"\n",  # spaces, and a key of a later version
        line_of(replace(launch(0), reason="Größe")).replace(b"\\u00f6", "ö".encode()),
        line_of(record(change=lambda s: replace(s, times_s=(0.00001, 2e8)), provenance="p")),  # 1e-05
        changed({k: v for k, v in BODY.items() if k not in ("reason", "wall_s")}),  # of an earlier version
    ],
)
def test_other_ways_of_writing_it_are_read_by_the_codec(tmp_path: Path, line: bytes) -> None:
    path = results_file(tmp_path / "r.jsonl", 0, 0)
    with path.open("ab") as out:
        out.write(line)
    (found,) = read(path).records.values()
    assert found == Record.from_json(json_line(line))


def of_schema_1(what: Record) -> bytes:
    """The line that was written of it before schema 2."""
    body = {name: value for name, value in what.to_json()["record"].items() if name != "launch"}
    for old, sample in zip(body["samples"], what.samples, strict=True):
        old |= {"times_s": list(sample.times_s), "run_s": sample.run_s}
        for holding, count in zip(old["holdings"], sample.allocator, strict=True):
            holding["allocator"] = count
    return json.dumps({"record": body | {"schema": 1}}).encode() + b"\n"


def test_records_of_schema_1_are_read_as_those_of_today(tmp_path: Path) -> None:
    path = results_file(tmp_path / "r.jsonl", 0, 0)
    with path.open("ab") as out:
        out.write(of_schema_1(launch(2)))
        out.write(of_schema_1(replace(record("dyadic"), provenance="p", samples=(), status="skip")))
    first, second = read(path).records.values()
    assert first == launch(2) and first.samples[0].allocator[0] == 6600 + 1002
    assert second.samples == ()
    assert Record.from_json(json_line(line_of(first))) == first


@pytest.mark.parametrize(("samples", "said"), [({}, "list"), ([1], "int"), ([{"rank": 0, "holdings": 3}], "holdings")])
def test_a_broken_record_of_schema_1_is_refused(samples: Any, said: str) -> None:
    body = json.loads(of_schema_1(launch(2)))["record"] | {"samples": samples}
    with pytest.raises(ValueError, match=f"record.samples.*{said}"):
        Record.from_json({"record": body})


def test_what_writer_writes_takes_the_fast_way(tmp_path: Path) -> None:
    path = results_file(tmp_path / "r.jsonl", 0, 0)
    with Writer(path) as writer:
        writer.write(launch(0))
    assert Reader().record(path.read_bytes().splitlines(keepends=True)[1]) == launch(0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], Path]]:
    folder = tmp_path_factory.mktemp("many")
    yield lambda cases, launches: results_file(folder / f"{cases}-{launches}.jsonl", cases, launches)


def calls_of(path: Path) -> int:
    """Function calls, of Python's and of C's, that a report takes."""
    profile = cProfile.Profile()
    profile.enable()
    assert cli.main(["report", str(path)]) == 0
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(("few", "many", "most"), [((20, 1), (40, 1), 5000), ((5, 10), (5, 30), 80)])
def test_work_grows_with_records_and_no_faster(
    files: Callable[[int, int], Path], few: tuple[int, int], many: tuple[int, int], most: int
) -> None:
    """most: calls for one record more, of four ranks: as a case of its own, judged and printed, or as a launch."""
    cli.main(["report", str(files(*few))])  # what is imported and remembered once is there
    a, b = calls_of(files(*few)), calls_of(files(*many))
    records = many[0] * many[1] - few[0] * few[1]
    assert b <= a * many[0] * many[1] / (few[0] * few[1])
    assert (b - a) / records <= most


@pytest.mark.parametrize(("few", "many", "most"), [((20, 1), (40, 1), 13_000), ((5, 10), (5, 30), 10_000)])
def test_memory_grows_with_records_and_no_faster(
    files: Callable[[int, int], Path], few: tuple[int, int], many: tuple[int, int], most: int
) -> None:
    """most: bytes that one record more keeps, of four ranks watched eight times: as a case of its own, or as a launch."""
    read(files(*few))
    kept = []
    for path in (files(*few), files(*many)):
        gc.collect()
        tracemalloc.start()
        results = read(path)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del results
    records = many[0] * many[1] - few[0] * few[1]
    assert (kept[1] - kept[0]) / records <= most


@pytest.mark.parametrize(
    "command",
    [("--help",), ("report", "FILE"), ("compare", "FILE", "absent"), ("history", "FILE"), ("explain", "FILE", "m0")],
)
def test_reading_commands_import_nothing_heavy(files: Callable[[int, int], Path], command: tuple[str, ...]) -> None:
    words = [str(files(1, 1)) if word == "FILE" else word for word in command]
    code = """if True:
        import sys
        from zerobench.cli import main
        try:
            main(sys.argv[1:])
        except SystemExit:
            pass
        heavy = {"torch", "numpy", "pandas", "pydantic", "matplotlib", "jinja2", "ruptures"}
        print(sorted(heavy & set(sys.modules)), "msgspec" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == f"[] {command != ('--help',)}"
