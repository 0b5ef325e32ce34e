"""The launcher against ranks that do well, raise, die, hang, flood and leave children; and its own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerobench.case import Case, Run
from zerobench.launch import autopsy, blackbox
from zerobench.launch.blackbox import Entry
from zerobench.launch.local import LaunchError, Local
from zerobench.launch.mismatch import disagreement, unanswered
from zerobench.record import Failure, Record

DEADLINE_S = 30.0
QUICK_S = 1.5  # for what is meant to hang


def a_run(n: int = 2, **options: str) -> Run:
    return Run("plain", Case("subject", "subject", "none", n, options=options))


def target(name: str) -> str:
    return f"zerobench.tests.subjects:{name}"


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local(preload=("torch", "torch.distributed", "zerobench.tests.subjects")) as local:
        yield local


def launch(local: Local, name: str, n: int = 2, deadline_s: float = DEADLINE_S) -> Record:
    return local.launch(a_run(n), deadline_s=deadline_s, suite="s", target=target(name))


def failures(record: Record) -> list[Failure]:
    """One of each rank; fails if a rank finished."""
    found = [sample.failure for sample in record.samples]
    assert all(found), record.reason
    return [failure for failure in found if failure is not None]


def test_our_own_adapters_are_imported_before_the_rank_that_needs_one_is_born(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would pay for it. A stranger's module is its rank's to import, and one that is not there is no crash."""
    (tmp_path / "stranger.py").write_text("import zerobench.implementations.fsdp1")
    monkeypatch.syspath_prepend(tmp_path)
    ours = "zerobench.implementations.fsdp2:Fsdp2"
    with Local(preload=("torch", "torch.distributed", "zerobench.tests.subjects")) as local:
        for reference, there in (
            ("stranger:X", ()),
            ("absent", ()),
            ("zerobench.absent:X", ()),
            (ours, ("fsdp2",)),
            ("absent", ("fsdp2",)),
        ):
            run = Run("plain", Case("subject", reference, "none", 1))
            (sample,) = local.launch(run, deadline_s=DEADLINE_S, target=target("imported")).samples
            assert sample.changed == there


@pytest.mark.parametrize("n", [1, 2, 5])  # five on fewer cores is fine
def test_ranks_meet_and_their_samples_come_back_in_order(local: Local, n: int) -> None:
    record = launch(local, "adds", n)
    assert (record.status, record.reason, record.suite, record.id) == ("ok", "", "s", a_run(n).id)
    assert [sample.rank for sample in record.samples] == list(range(n))
    assert [sample.reports[0].loss for sample in record.samples] == [n] * n
    assert record.claims is not None


def test_a_plug_in_finds_torchruns_surroundings(local: Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEROBENCH_MARK", "set after the fork server began")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "17")  # of a job: a launcher of local ranks asks nobody
    monkeypatch.chdir(tmp_path)
    facts = dict(line.partition("=")[::2] for line in launch(local, "surroundings", 1).reason.splitlines())
    assert facts.pop("MASTER_PORT").isdigit()
    assert facts == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MARK": "set after the fork server began",
        "threads": "1",
        "cwd": str(tmp_path),
        "shared": "[]",
        "stdin": "''",
        "env://": "1",
    }


def test_an_answer_of_megabytes_arrives(local: Local) -> None:
    record = launch(local, "megabytes")
    assert [len(sample.changed[0]) for sample in record.samples] == [5_000_000, 5_000_000]


@pytest.mark.parametrize(
    ("name", "kind", "what", "place"),
    [
        ("raises", "raised", "ZeroDivisionError: planted", ("forward", 2)),
        ("exits", "died", "exited with code 3", ("", -1)),
        ("killed", "died", "killed by SIGKILL", ("step", 1)),
    ],
)
def test_the_culprit_is_told_from_the_rank_that_waited_for_it(
    local: Local, name: str, kind: str, what: str, place: tuple[str, int]
) -> None:
    began = time.monotonic()
    record = launch(local, name)
    waiting, culprit = failures(record)
    assert record.status == "error" and record.reason.startswith(f"rank 1 {kind}: {what}")
    assert (culprit.kind, culprit.phase, culprit.step) == (kind, *place) and what in culprit.what
    assert waiting.kind == "waiting" and waiting.what.startswith("for rank 1: ")
    assert (waiting.phase, waiting.step, waiting.last_call) == ("backward", 3, "all-reduce of 1 fp32 in ranks 0,1")
    assert time.monotonic() - began < DEADLINE_S / 2
    if name == "exits":
        assert culprit.stack.endswith("about to leave")


def test_a_rank_that_hangs_in_python_leaves_its_stack(local: Local) -> None:
    record = launch(local, "sleeps", deadline_s=QUICK_S)
    waiting, hung = failures(record)
    assert hung.kind == "hung" and f"no answer within {QUICK_S:g} s, in oversleep (subjects.py:" in hung.what
    assert "in sleeps" in hung.stack and "launch/server.py" not in hung.stack
    assert waiting.kind == "waiting" and "in all_reduce (distributed_c10d.py:" in waiting.what


def test_a_rank_that_leaves_early_does_not_keep_the_others_until_the_deadline(local: Local) -> None:
    began = time.monotonic()
    record = launch(local, "mismatch")
    assert record.status == "error" and record.reason.endswith("rank 1 had finished")
    assert record.samples[0].failure is not None and record.samples[1].failure is None
    assert time.monotonic() - began < DEADLINE_S / 2


def test_a_flood_of_output_is_bounded_and_its_end_kept(local: Local) -> None:
    record = launch(local, "floods", 1)
    (failure,) = failures(record)
    assert failure.what == "RuntimeError: drowned" and failure.stack.endswith("the last word")
    assert len(failure.stack) < autopsy.EXCERPT_CHARACTERS + 2000


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("half_skips", "error", "rank 1 skipped (odd), rank 0 did not"),
        ("all_skip", "skip", "no such thing"),
        ("claims_differ", "error", "the ranks' claims differ: rank 0: stage=0; rank 1: stage=1"),
        ("calls_sys_exit", "error", "ranks 0, 1 raised: SystemExit: 4"),
        ("garbles", "error", "ranks 0, 1 died: what it answered cannot be read"),
        ("returns_none", "error", "returned NoneType, not an Outcome"),
        ("no_such_function", "error", "has no attribute 'no_such_function'"),
    ],
)
def test_outcomes_are_merged(local: Local, name: str, status: str, reason: str) -> None:
    record = launch(local, name)
    assert record.status == status and reason in record.reason


def test_no_descriptor_file_or_process_remains(
    local: Local, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    launch(local, "nothing")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        launch(local, "adds")
        launch(local, "killed")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(scratch) == []
    record = local.launch(a_run(pids=str(tmp_path)), deadline_s=DEADLINE_S, target=target("leaves_children"))
    children = _pids(tmp_path)
    assert record.status == "ok" and len(children) == 4
    assert not any(map(_alive, children))
    assert _children(local.server_pid) == []


def test_an_interrupt_ends_the_ranks_and_is_raised_again(tmp_path: Path) -> None:
    with Local(preload=()) as local:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt() -> None:
            _wait_for_pids(tmp_path, 2)
            os.kill(os.getpid(), signal.SIGINT)

        watch = threading.Thread(target=interrupt)
        try:
            watch.start()
            with pytest.raises(KeyboardInterrupt):
                local.launch(a_run(2, pids=str(tmp_path)), deadline_s=DEADLINE_S, target=target("never_ends"))
        finally:
            watch.join()
            signal.signal(signal.SIGINT, before)
        assert local.server_pid is None
        assert _gone(_pids(tmp_path), within_s=1)


_LAUNCHER = """
import sys
from zerobench.case import Case, Run
from zerobench.launch.local import Local
local = Local(preload=())
local.warm()
print(local.server_pid, flush=True)
run = Run("plain", Case("subject", "subject", "none", 2, options={"pids": sys.argv[1]}))
local.launch(run, deadline_s=60, target="zerobench.tests.subjects:never_ends")
"""


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_nobody_survives_a_kill(victim: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rank 0 holds the GIL in C, where no thread of its own could act; each rank has a child."""
    scratch = tmp_path_factory.mktemp("scratch")
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(scratch)},
        text=True,
    )
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    try:
        _wait_for_pids(tmp_path, 2)
        assert len(list(scratch.glob("zerobench-*"))) == 1
        os.kill(launcher.pid if victim == "launcher" else server, signal.SIGKILL)
        assert _gone([server, *_pids(tmp_path)], within_s=3)
        assert launcher.wait(10) == (-signal.SIGKILL if victim == "launcher" else 1)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    assert list(scratch.glob("zerobench-*")) == []


def test_the_black_box_keeps_one_line(tmp_path: Path) -> None:
    path = tmp_path / "note"
    assert blackbox.read(path) == ""
    box = blackbox.BlackBox(path)
    box.note("x" * 5000)
    assert blackbox.read(path) == "x" * blackbox.NBYTES
    box.note("backward of step 2: all-reduce of 8 fp32")
    assert blackbox.parse(blackbox.read(path)) == ("backward", 2, "all-reduce of 8 fp32")
    assert blackbox.parse("building the model") == ("building the model", -1, "")


def test_blame_needs_a_culprit() -> None:
    lost = Failure("raised", "RuntimeError: Connection closed by peer [127.0.0.1]:1")
    stopped = Failure("stopped", "still running")
    assert autopsy.blame({0: lost, 1: lost}) == {0: lost, 1: lost}
    told = autopsy.blame({0: lost, 1: Failure("died", "killed by SIGSEGV"), 2: stopped})
    assert [told[rank].kind for rank in range(3)] == ["waiting", "died", "stopped"]


def _children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.iterdir() for pid in file.read_text().split()]


def _wait_for_pids(folder: Path, ranks: int) -> None:
    end = time.monotonic() + 30
    while len(_pids(folder)) < 2 * ranks:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pids: list[int], *, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(_alive, pids))


def test_a_preload_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROBENCH_PRELOAD", "json,colorsis")
    with (
        pytest.raises(LaunchError, match="ZEROBENCH_PRELOAD names 'colorsis', which is not installed"),
        Local() as local,
    ):
        local.warm()


def test_only_the_calls_of_one_communicator_are_numbered_together() -> None:
    def entry(group: str, ordinal: int, numel: int) -> Entry:
        return Entry(group, ordinal, f"all-reduce of {numel} fp32", f"all-reduce {numel} fp32 None")

    here = [entry("0-1", 1, 8), entry("0-1 (7)", 1, 16)]
    assert disagreement({0: here, 1: here[::-1]}) is None
    found = disagreement({0: here, 1: [here[0], entry("0-1 (7)", 1, 15)]})
    assert found is not None
    assert "size of collective 1 of ranks 0-1 (7)" in found.text
    assert "which rank 1 did not enter" in unanswered({0: here, 1: here[:1]})


@pytest.mark.parametrize("line", ["raise ValueError('no\\x1b[31m')", "import sys; sys.exit(3)"])
def test_a_preload_that_fails_is_said_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "unwell.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ZEROBENCH_PRELOAD", "unwell")
    with Local(preload=("torch", "zerobench.worker")) as local:
        assert launch(local, "adds").status == "ok"
    said = capfd.readouterr().err
    assert "unwell could not be imported before the ranks start: " in said
    assert "\x1b" not in said
