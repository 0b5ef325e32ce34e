"""Faults of the disk: full, read-only, removed, slow; files cut off at any byte; two runs in one folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.judge import judge
from zerobench.record import Sample
from zerobench.store import StoreError, Writer, begun, read, results_path
from zerobench.tests.faults.bench import Bench, done
from zerobench.tests.faults.namespaces import inside
from zerobench.tests.faults.parent_rows import first_record
from zerobench.tests.faults.row import Row, Wrong
from zerobench.tests.faults.verdicts import RUNS, SUITE, kept, resumed, undisturbed

SLOW_S = 0.7
STEP = 17  # of the bytes at which the quick part cuts; the full matrix takes every one
SLOW = f"""\
import os, sys, time
real = os.fsync
def fsync(fd):
    time.sleep({SLOW_S})
    return real(fd)
os.fsync = fsync
from zerobench.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def rows() -> list[Row]:
    whole = "every record that was told; --resume ends as an undisturbed run"
    return [
        Row("the disk", "full", "the results folder has room for two records", whole, _full, True),
        Row("the disk", "full for ranks", "the temporary folder is full", "nothing is blamed on a subject", _no_room),
        Row("the disk", "full in mid-run", "a rank fills the temporary folder", "the records", _filled),
        Row("the disk", "read-only", "the results folder cannot be written", "nothing is run", _read_only),
        Row("the disk", "folder removed", "the results folder is removed in mid-run", "every record", _removed),
        Row("the disk", "cut off", "a results file ends at any byte of its last two lines", whole, _cut_off, True),
        Row("the disk", "two runs", "two runs in one folder at the same time", "a file each, whole", _two),
        Row("the disk", "same second", "two files of one second and host", "a file each", _same_second, True),
        Row(
            "the disk",
            "two resume one",
            "two runs go on with one file",
            "the first one's; the second is refused",
            _both,
        ),
        Row("the disk", "slow", f"each fsync takes {SLOW_S} s", "everything", _slow),
    ]


def _full(bench: Bench) -> str:
    """A small file system; what is in it is copied out before it goes."""
    alone = bench.apart("full")
    size = _line_nbytes(bench) * 5 // 2
    (alone.folder / "results").mkdir()
    before = inside(["-m"], f"mount -t tmpfs -o size={size} none results", "cp -r results saved")
    code, out, err = alone.run(*SUITE, before=before)
    if code != 3 or "make room, or name another folder" not in err or "--resume" not in err or "pass" in out:
        raise Wrong("not told", f"exit code {code}: {(out + err)[-600:]}")
    (path,) = (alone.folder / "saved").glob("*.jsonl")
    if not 1 <= kept(path, err) < RUNS:
        raise Wrong("case lost", f"{path.name} has {kept(path, err)} records")
    if bench.whole:
        resumed(alone, path)
    return _line(alone, err, "make room")


def _line_nbytes(bench: Bench) -> int:
    """The longest line of an undisturbed run's file, in whole pages, as a tmpfs counts them."""
    longest = max(map(len, _source(bench).read_bytes().splitlines()))
    return -(-longest // 4096) * 4096


def _source(bench: Bench) -> Path:
    """The results file of the undisturbed run."""
    undisturbed(bench)
    (path,) = bench.folder.glob("undisturbed-*/results/*.jsonl")
    return path


def _no_room(bench: Bench) -> str:
    alone = bench.apart("no-room")
    code, out, err = alone.run(*SUITE, before=inside(["-m"], "mount -t tmpfs -o size=16k none tmp"))
    if code != 3 or "TMPDIR names another" not in err or "fail" in out:
        raise Wrong("wrong verdict" if "fail" in out else "not told", f"exit code {code}: {(out + err)[-600:]}")
    return _line(alone, err, "TMPDIR")


def _filled(bench: Bench) -> str:
    """The black boxes have their room before the subject fills the rest; the next run has none."""
    alone = bench.apart("filled")
    text = (alone.folder / "short.yaml").read_text()
    faulty = "zerobench.tests.faults.faulty:Faulty"
    text = text.replace("[ddp, zero2]", f"['{faulty}', zero2]")
    (alone.folder / "short.yaml").write_text(text + f"options: {{'{faulty}': {{fault: fill-disk, at: forward}}}}\n")
    code, out, err = alone.run(*SUITE, before=inside(["-m"], "mount -t tmpfs -o size=4m none tmp"))
    # The rank goes on, and its files go with its folder: the next run has room again.
    if code not in (0, 3) or "Traceback" in err:
        raise Wrong("wrong verdict", f"exit code {code}: {(out + err)[-900:]}")
    if kept(alone.results()[0], err) != RUNS:
        raise Wrong("case lost", err[-600:])
    return "nothing: what a rank leaves in the shared folder goes with its run"


def _read_only(bench: Bench) -> str:
    alone = bench.apart("read-only")
    (alone.folder / "results").mkdir()
    code, _, err = alone.run(*SUITE, before=inside(["-m"], "mount -t tmpfs -o ro none results"))
    if code != 3 or "Read-only file system; name another folder with --results" not in err or "[1/" in err:
        raise Wrong("not told", f"exit code {code}: {err[-600:]}")
    return _line(alone, err, "Read-only")


def _removed(bench: Bench) -> str:
    alone = bench.apart("removed")
    process = alone.start(*SUITE, "--json", "verdict.json")
    first_record(alone, process)
    shutil.rmtree(alone.folder / "results")
    code, _, err = done(process)
    (path,) = alone.results()
    if code or kept(path, err) != RUNS:
        raise Wrong("case lost", f"exit code {code}: {err[-600:]}")
    if "was removed while it was written" not in err:
        raise Wrong("not told", err[-600:])
    return _line(alone, err, "was removed")


def _cut_off(bench: Bench) -> str:
    """Each cut: what `report` would say is not green, and what `run --resume` does next keeps every whole record."""
    source, path = _source(bench), bench.folder / "cut.jsonl"
    with Writer(path) as writer:
        writer.write(read(source).provenance)
        for record in read(source).records.values():  # without what they measured: short lines, and every byte is tried
            writer.write(replace(record, samples=tuple(Sample(s.rank) for s in record.samples)))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    records = list(read(path).records.items())
    cases = [Case.from_json(dict(case)) for case in read(path).provenance.cases]
    checks = read(path).provenance.checks
    start = len(whole) - len(lines[-1]) - len(lines[-2])
    cuts = [*range(start, len(whole), 1 if bench.whole else STEP), len(whole) - len(lines[-1]), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        found = begun(path)
        ended = len([line for line in whole[:cut].splitlines(keepends=True) if line.endswith(b"\n")]) - 1
        if found is None or len(found.records) != ended:
            raise Wrong("case lost", f"cut at byte {cut}: {ended} whole records")
        if cut == cuts[0] or cut >= cuts[-2]:
            statuses = {f.status for f in judge("short", cases, checks, found.records).findings}
            if Status.ERROR not in statuses:
                raise Wrong("wrong verdict", f"cut at byte {cut}: what was not run is not told")
        with Writer(path) as writer:
            for _, record in records[ended:]:
                writer.write(record)
        if path.read_bytes() != whole:
            raise Wrong("case lost", f"cut at byte {cut}: what is added does not follow what was there")
    for cut in (0, 1, len(lines[0]) // 2, len(lines[0]) - 1):
        path.write_bytes(whole[:cut])
        if begun(path) is not None:
            raise Wrong("wrong verdict", f"cut at byte {cut}, inside the first line")
    alone = bench.apart("cut-off")
    path = alone.folder / "cut.jsonl"
    path.write_bytes(source.read_bytes()[:-20_000])
    code, out, err = alone.run("report", str(path))
    if code != 3 or "is cut off" not in err or "not run" not in out:
        raise Wrong("wrong verdict", f"report: exit code {code}: {(out + err)[-600:]}")
    if bench.whole:
        resumed(alone, path)
    return f"{len(cuts)} cuts; report, exit code 3: {_line(alone, err, 'cut off')}"


def _two(bench: Bench) -> str:
    alone = bench.apart("two")
    pair = [alone.start(*SUITE, "--json", f"verdict{i}.json") for i in range(2)]
    for i, process in enumerate(pair):
        code, _, err = done(process)
        path = alone.folder / err.strip().splitlines()[-1].removeprefix("results: ")
        if code or kept(path, err) != RUNS or len(path.read_bytes().splitlines()) != RUNS + 1:
            raise Wrong("case lost", f"exit code {code}: {err[-600:]}")
        if tuple((f["id"], f["status"]) for f in _json(alone.folder / f"verdict{i}.json")) != undisturbed(bench):
            raise Wrong("wrong verdict", "of two runs in one folder, one judges otherwise")
    if len(alone.results()) != 2:
        raise Wrong("case lost", f"two runs left {len(alone.results())} files")
    return "a file each, and the undisturbed verdict twice"


def _json(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _same_second(bench: Bench) -> str:
    now = datetime.now(UTC)
    path = results_path(bench.folder, "short", socket.gethostname(), now)
    with Writer.fresh(path) as one, Writer.fresh(path) as other:
        names = {one.path.name, other.path.name}
        if len(names) != 2 or not all(name.startswith(path.stem) for name in names):
            raise Wrong("case lost", f"{names}")
    return re.sub(r"\S+(-2\.jsonl)", r"<suite>-<utc>-<host>\1", sorted(names)[0])


def _both(bench: Bench) -> str:
    path = bench.folder / "both.jsonl"
    path.write_bytes(_source(bench).read_bytes())
    with Writer(path):
        try:
            Writer(path).close()
        except StoreError as error:
            told = str(error)
        else:
            raise Wrong("case lost", "two writers have one file")
    return told.replace(str(bench.folder) + "/", "")


def _slow(bench: Bench) -> str:
    alone = bench.apart("slow")
    code, _, err = done(alone.start_code(["-c", SLOW, *SUITE]))
    if code or kept(alone.results()[0], err) != RUNS:
        raise Wrong("wrong verdict", f"exit code {code}: {err[-600:]}")
    return "nothing: no deadline runs while records are written"


def _line(bench: Bench, err: str, word: str) -> str:
    text = next((line for line in err.splitlines() if word in line), "")
    return text.replace(str(bench.folder) + os.sep, "").replace(sys.executable, "python")
