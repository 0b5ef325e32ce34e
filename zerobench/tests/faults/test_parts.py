"""The parts of the launcher that stand between a fault and its name, each alone."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from zerobench import interrupt
from zerobench.case import Case
from zerobench.launch import blackbox, folders, limits, vigil
from zerobench.launch.autopsy import End, failure
from zerobench.launch.blackbox import BlackBox, Entry
from zerobench.launch.merge import merge
from zerobench.launch.mismatch import disagreement, unanswered
from zerobench.launch.vigil import Vital, Watched
from zerobench.rank import JOINING, Outcome
from zerobench.record import Call, Failure, Provenance, Sample
from zerobench.store import StoreError, Writer, read
from zerobench.terms import Collective
from zerobench.tests.made import record

RUN = Case("x", "x", "mlp-tiny", 2).run("plain")


def logs(tmp_path: Path, *ranks: list[Call]) -> dict[int, list[Entry]]:
    for rank, calls in enumerate(ranks):
        box = BlackBox(tmp_path / f"{rank}")
        for call in calls:
            box.entered(call)
    return {rank: blackbox.entries(tmp_path / f"{rank}") for rank in range(len(ranks))}


def call(kind: Collective, numel: int, group: tuple[int, ...] = (0, 1), root: int | None = None) -> Call:
    return Call(1, "backward", kind, numel, 4 * numel, "fp32", group, root)


A, B, G = call(Collective.ALL_REDUCE, 100), call(Collective.ALL_REDUCE, 7), call(Collective.ALL_GATHER, 100)


@pytest.mark.parametrize(
    ("one", "other", "aspect", "ordinal"),
    [
        ([A, A], [A, G], "kind", 2),
        ([A], [B], "size", 1),
        ([A, B, A], [B, A, A], "order", 1),
        ([call(Collective.BROADCAST, 3, root=0)], [call(Collective.BROADCAST, 3, root=1)], "root", 1),
    ],
)
def test_a_disagreement_is_named(tmp_path: Path, one: list[Call], other: list[Call], aspect: str, ordinal: int) -> None:
    found = disagreement(logs(tmp_path, one, other))
    assert found is not None and found.ranks == {0, 1}
    assert f"the {aspect} of collective {ordinal} of ranks 0-1: rank 0 entered " in found.text


def test_ranks_that_may_differ_do_not_disagree(tmp_path: Path) -> None:
    """Uneven shares, messages between two, groups that only some are in, groups that torch does not know, and a log of
    which the one rank has kept more."""
    uneven = [call(Collective.ALL_TO_ALL, n) for n in (5, 9)]
    sent, received = call(Collective.SEND, 4, root=1), call(Collective.RECV, 4, root=0)
    unknown = call(Collective.ALL_REDUCE, 1, (-1, -1)), call(Collective.ALL_REDUCE, 2, (-1, -1))
    own = call(Collective.ALL_REDUCE, 3, (0, 2))
    found = logs(tmp_path, [uneven[0], sent, own, unknown[0], A], [uneven[1], received, unknown[1], A])
    assert disagreement(found) is None
    assert unanswered(found).endswith("(collective 1 of ranks 0,2), which rank 2 did not enter")
    many = logs(tmp_path, [A] * (blackbox.KEPT + 50), [A])
    assert disagreement(many) is None and len(many[0]) == blackbox.KEPT


def test_what_is_behind_is_named(tmp_path: Path) -> None:
    assert unanswered(logs(tmp_path, [A, B], [A])) == (
        "rank 0 entered all-reduce of 7 fp32 (collective 2 of ranks 0-1), which rank 1 did not enter"
    )


def end(rank: int, found: Failure | None = None, **more: object) -> End:
    outcome = Outcome("error" if found else "ok", Sample(rank, failure=found), found.what if found else "")
    return End(rank, outcome, **more)  # type: ignore[arg-type]


def test_a_rank_that_dies_after_its_answer_has_not_finished() -> None:
    merged = merge(RUN, [end(0), end(1, code=-signal.SIGSEGV)], suite="s", deadline_s=1, wall_s=0)
    assert merged.status == "error" and "rank 1 died: killed by SIGSEGV after it had answered" in merged.reason
    assert merge(RUN, [end(0, code=0), end(1)], suite="s", deadline_s=1, wall_s=0).status == "ok"


def test_ranks_that_cannot_meet_say_nothing_about_the_subject() -> None:
    apart = Failure("raised", "RuntimeError: no interface", JOINING)
    merged = merge(RUN, [end(0, apart), end(1, apart)], suite="s", deadline_s=1, wall_s=0)
    assert merged.status == "invalid" and "could not meet" in merged.reason
    died = End(1, None, code=-9, note="importing the implementation")
    merged = merge(RUN, [end(0, apart), died], suite="s", deadline_s=1, wall_s=0)
    assert merged.status == "error" and merged.reason.startswith("rank 1 died")


def test_memory_that_was_refused_names_the_limit() -> None:
    dead = End(0, None, code=-6, output="terminate called after\n  what():  std::bad_alloc\n", limit_nbytes=2 * 10**9)
    found = failure(dead, 1.0)
    assert found is not None and found.what.startswith("ran out of its 2 GB (ZEROBENCH_RANK_MEMORY gives a rank more)")
    assert limits.ran_out("ValueError: no", 1) == "ValueError: no"
    for said in (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] data",
        "RuntimeError: [enforce fail a",
        "bad_alloc",
    ):
        assert limits.ran_out(said, 1) == f"ran out of its 1 B (ZEROBENCH_RANK_MEMORY gives a rank more): {said}"


def test_the_share_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_nbytes", lambda: 100 << 30)
    assert limits.share_nbytes(4, {}) == (80 << 30) // 4
    assert limits.share_nbytes(1000, {}) == limits.LEAST_NBYTES
    assert limits.share_nbytes(4, {limits.VARIABLE: "3GB"}) == 3 * 10**9
    with pytest.raises(ValueError, match=r"ZEROBENCH_RANK_MEMORY: .*an amount of memory"):
        limits.share_nbytes(4, {limits.VARIABLE: "much"})
    monkeypatch.setattr(limits, "available_nbytes", lambda: 1 << 30)
    assert limits.share_nbytes(1000, {}) == int((1 << 30) * limits.SHARE)


def watched(tmp_path: Path, looks: list[tuple[float, int, float]], state: str = "S", quiet_s: float = 10.0) -> str:
    one = Watched(0, tmp_path)
    one.looks.extend(looks)
    one.vital = type(one.vital)(state, looks[-1][2])
    one.beat = blackbox.Beat(looks[-1][1], looks[-1][0] - quiet_s)
    return one.words(looks[-1][0], 10.0)


def test_slow_busy_stopped_and_asleep_are_told_apart(tmp_path: Path) -> None:
    assert watched(tmp_path, [(0, 5, 0.0), (10, 9, 2.0)], quiet_s=4.0).startswith("busy, with 2.0 s of CPU")
    assert (
        watched(tmp_path, [(0, 5, 0.0), (10, 9, 1.0)], quiet_s=2.0)
        == "slow, not hanging: 4 signs of progress in the last 10.0 s"
    )
    assert watched(tmp_path, [(0, 5, 0.0), (10, 5, 8.0)]).startswith("busy, with 8.0 s of CPU in the last 10.0 s")
    assert watched(tmp_path, [(0, 5, 0.0), (10, 5, 0.0)]).startswith("asleep, no sign of progress for 10.0 s")
    assert watched(tmp_path, [(0, 5, 0.0), (10, 5, 0.0)], "R").startswith("ready to run, but the machine gave it 0.0 s")
    assert (
        watched(tmp_path, [(0, 5, 0.0), (10, 9, 1.0)], "T", quiet_s=0.1) == "it was stopped, by SIGSTOP or a debugger"
    )


@pytest.mark.parametrize(
    ("notes", "cpu_s", "delay_s", "lateness"),
    [
        (9, 2.0, 6.0, "starved"),  # it got on, for most of its life without a core
        (9, 2.0, 4.0, "slow"),
        (5, 0.1, 6.0, "starved"),
        (5, 3.0, 6.0, "hung"),  # a loop on a busy machine has its share of the cores
        (5, 0.1, 0.1, "hung"),
    ],
)
def test_a_rank_without_a_core_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: int, cpu_s: float, delay_s: float, lateness: str
) -> None:
    looks = [
        (Vital("S"), blackbox.Beat(5, 0.0), 0.0),
        (Vital("S", cpu_s, "", delay_s), blackbox.Beat(notes, 9.9), 10.0),
    ]
    watch = vigil.Vigil(20.0)
    watch.add(0, 0, tmp_path)
    for seen, beat, now in looks:
        monkeypatch.setattr(vigil, "vital", lambda pid, seen=seen: seen)
        monkeypatch.setattr(blackbox, "beat", lambda path, beat=beat: beat)
        monkeypatch.setattr(vigil.time, "monotonic", lambda now=now: now)
        watch.look()
    assert watch.lateness(0) == lateness


def test_a_starved_run_says_nothing_about_the_subject() -> None:
    waits = (
        'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 1 in all_reduce\n'
    )
    starved = End(0, None, code=-9, cut="starved", note="forward of step 1")
    asleep, hung = End(1, None, code=-9, cut="hung", stacks=waits), End(1, None, code=-9, cut="hung")
    merged = merge(RUN, [starved, asleep], suite="s", deadline_s=1, wall_s=0)
    assert merged.status == "invalid" and "the machine gave the ranks no time" in merged.reason
    assert merge(RUN, [starved, hung], suite="s", deadline_s=1, wall_s=0).status == "error"


def test_a_folder_goes_whatever_its_modes() -> None:
    """As a user who is not root: root may do everything."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                inner = Path(place, "run", "a", "b")
                inner.mkdir(parents=True)
                (inner / "file").touch()
                inner.chmod(0)
                inner.parent.chmod(0)
                folders.remove(Path(place, "run"))
                code = int(Path(place, "run").exists())
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_results_file_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """Two records were in it and one comes: all are there, and the file that a stranger put in its place is untouched."""
    path = tmp_path / "results" / "r.jsonl"
    about = Provenance("p", "0", "made", "", "host", "2026-01-01T00:00:00+00:00")
    with Writer.fresh(path) as writer:
        writer.write(about)
        writer.write(record())
        shutil.rmtree(path.parent)
        writer.write(record("wire"))
        assert writer.path == path and "made again" in writer.problems[0]
        path.unlink()
        path.write_text("a stranger's")
    assert path.read_text() == "a stranger's" and writer.path == path.with_name("r-2.jsonl")
    assert [r.run.scenario for r in read(writer.path).records.values()] == ["plain", "wire"]


def test_one_writer_a_file(tmp_path: Path) -> None:
    with Writer(tmp_path / "r.jsonl"), pytest.raises(StoreError, match="another zerobench writes to it"):
        Writer(tmp_path / "r.jsonl")
    Writer(tmp_path / "r.jsonl").close()


def test_signals_that_ask_for_the_end() -> None:
    """The first SIGINT waits, the second does not; SIGTERM does not; what is ignored stays so; and all is put back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    found = [signal.getsignal(number) for number in numbers]
    before: list[Any] = [
        signal.default_int_handler,
        signal.SIG_DFL,
        signal.SIG_IGN,
    ]  # a background job's SIGINT would be ignored
    try:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        with interrupt.listening(), interrupt.patient() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            assert asked.code == 130
            with pytest.raises(interrupt.Stop) as twice:
                _kill_and_wait(signal.SIGINT)
            with pytest.raises(interrupt.Stop) as ended:
                _kill_and_wait(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # once is enough
        assert [interrupt.exit_code(e.value) for e in (twice, ended)] == [130, 143]
        assert interrupt.name(143) == "SIGTERM" and interrupt.exit_code(KeyboardInterrupt()) == 130
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        for number, handler in zip(numbers, found, strict=True):
            signal.signal(number, handler)


def _kill_and_wait(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)


def test_another_thread_installs_no_handler() -> None:
    codes: list[int] = []

    def run() -> None:
        with interrupt.listening(), interrupt.patient() as asked:
            codes.append(asked.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]
