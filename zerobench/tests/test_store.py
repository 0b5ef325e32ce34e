"""What is written can be read; what is damaged is refused, but for a torn last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from zerobench.case import Case, Run
from zerobench.claims import Claims
from zerobench.record import SCHEMA, Holding, ModelFacts, Peak, Provenance, Record, Report, Sample
from zerobench.store import StoreError, Writer, frame, read, results_path
from zerobench.terms import Moment, Stage

PROVENANCE = Provenance("p1", "0.1.0", "smoke", "digest", "host", "2025-01-01T00:00:00+00:00")


def a_record(scenario: str = "plain", **changes: object) -> Record:
    samples = tuple(
        Sample(
            rank,
            holdings=(Holding(1, Moment.BACKWARD, {"parameter": 40 + rank, "optimizer": 80}, 120, 0),),
            peaks=(Peak(1, "backward", 200 + rank),),
            times_s=(1.0 + rank, 3.0, 2.0),
            reports=(Report(0, float("nan")),),
        )
        for rank in range(2)
    )
    record = Record("smoke", Run(scenario, Case("zero2", "zero2", "mlp", 2)), "ok", samples=samples, provenance="p1")
    record = replace(record, claims=Claims(Stage.GRADIENT), model=ModelFacts(psi=10))
    return replace(record, **changes)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A results file of one provenance and two records."""
    path = tmp_path / "new" / "r.jsonl"
    with Writer(path) as writer:
        for item in (PROVENANCE, a_record(), a_record("dyadic")):
            writer.write(item)
    return path


def test_what_is_written_is_read(path: Path) -> None:
    results = read(path)
    assert (results.provenance, results.problems) == (PROVENANCE, ())
    assert list(results.records) == [a_record().id, a_record("dyadic").id]
    first = results.records[a_record().id]
    assert first.claims == Claims(Stage.GRADIENT) and first.samples[1].holdings == a_record().samples[1].holdings
    assert str(first.samples[0].reports[0].loss) == "nan"


def test_a_resumed_run_replaces_and_adds(path: Path) -> None:
    later = replace(PROVENANCE, id="p2")
    with Writer(path) as writer:
        writer.write(later)
        writer.write(a_record(status="error", reason="again", provenance="p2"))
    results = read(path)
    assert results.provenance == later and list(results.provenances) == ["p1", "p2"]
    assert [record.status for record in results.records.values()] == ["error", "ok"]


def test_a_torn_last_line_is_said_and_cut_off_before_more_is_written(path: Path) -> None:
    whole = path.read_bytes()
    for cut in (1, 100):  # one: only the newline is missing
        path.write_bytes(whole[:-cut])
        results = read(path)
        assert list(results.records) == [a_record().id]
        (problem,) = results.problems
        assert f"{path}:3: the last line is cut off" in problem
    with Writer(path) as writer:
        writer.write(a_record("dyadic"))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "neither a record nor a provenance"),
        (b'{"record": {"schema": NaN}}', "NaN is not JSON"),
        (json.dumps({"record": a_record().to_json()["record"] | {"schema": SCHEMA + 1}}).encode(), "upgrade"),
        (json.dumps({"record": a_record().to_json()["record"] | {"wall_s": "long"}}).encode(), "record.wall_s"),
        (json.dumps(a_record(provenance="p9").to_json()).encode(), "'p9', which is not above it"),
        (b"\xff\xfe", "byte 0xff at 1 is not UTF-8"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"record": ' + b"9" * 30 + b"}", "a whole number of more than 64 bits"),
    ],
)
def test_anything_else_is_refused_by_line(path: Path, line: bytes, what: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))
    with pytest.raises(StoreError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ") and what in str(caught.value)


def test_other_files_are_refused_and_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ('{"a": 1}\n', "precious, without a newline"):
        other.write_text(text)
        with pytest.raises(StoreError):
            read(other)
        with pytest.raises(StoreError, match="not a results file"):
            Writer(other)
        assert other.read_text() == text
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(StoreError, match="no zerobench results"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(StoreError, match="cannot be opened"):
        Writer(tmp_path)


def test_a_failed_write_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = path.read_bytes(), os.write
    with Writer(path) as writer:
        monkeypatch.setattr(os, "write", lambda fd, line: real(fd, line[:10]))  # a full disk takes a part
        with pytest.raises(StoreError, match=r"r\.jsonl: cannot be written: only 10 of \d+ bytes"):
            writer.write(a_record("adam"))
    assert path.read_bytes() == before


def test_the_file_name_is_safe_and_in_utc(tmp_path: Path) -> None:
    noon = datetime(2025, 1, 2, 12, 0, 0, tzinfo=timezone(timedelta(hours=2)))
    assert results_path(tmp_path, "../my suite", "host/a;b", noon).relative_to(tmp_path) == Path(
        "my_suite-20250102T100000Z-host_a_b.jsonl"
    )


def test_the_frame_has_a_row_a_run(path: Path) -> None:
    table = frame(read(path))
    assert list(table["scenario"]) == ["plain", "dyadic"]
    row = table.iloc[0]
    assert (row["parameter_nbytes"], row["optimizer_nbytes"], row["peak_nbytes"], row["psi"]) == (41, 80, 201, 10)
    assert row["step_s"] == 2.0  # the slowest rank's steps are 2, 3 and 2 seconds
    assert row[["gradient_nbytes"]].isna().all()


def test_neither_torch_nor_pandas_is_imported() -> None:
    code = "import sys, zerobench.store, zerobench.provenance; assert not {'torch', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
