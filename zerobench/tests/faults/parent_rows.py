"""Faults of the parent, `zerobench run` itself: signals that ask for its end, and SIGKILL at random moments."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerobench.store import StoreError, begun
from zerobench.tests.faults.bench import FAULTY, Bench, done
from zerobench.tests.faults.row import Row, Wrong
from zerobench.tests.faults.verdicts import RUNS, SUITE, kept, read, resumed, undisturbed, undisturbed_s

KILLS, QUICK_KILLS = 200, 5
SEED = 20260101
STOP_S = 15.0  # from a signal to the end
WAIT_S = 300.0


def rows() -> list[Row]:
    resumable = "the runs that were done; --resume ends as an undisturbed run"
    return [
        Row(
            "the parent",
            "SIGINT, once",
            "Ctrl-C while a run is on",
            f"the run that was on too; {resumable}",
            _once,
            True,
        ),
        Row("the parent", "SIGINT, twice", "Ctrl-C, and again while a rank hangs", resumable, _twice),
        Row("the parent", "SIGTERM", "SIGTERM while a run is on", resumable, _by(signal.SIGTERM), True),
        Row("the parent", "SIGHUP", "SIGHUP while a run is on", resumable, _by(signal.SIGHUP)),
        Row("the parent", "SIGHUP, ignored", "SIGHUP under nohup", "everything: it runs on", _ignored),
        Row("the parent", "SIGTERM, at once", "SIGTERM before the first rank is born", resumable, _at_once),
        Row(
            "the parent",
            "its fork server is killed",
            "SIGKILL of the fork server while a rank hangs that has children in other sessions",
            resumable,
            _server,
        ),
        Row(
            "the parent",
            "its fork server is killed between runs",
            "SIGKILL of the fork server after one run and before the next",
            "everything: it starts another",
            _server_between,
            True,
        ),
        Row(
            "the parent",
            "SIGKILL",
            "SIGKILL at a random moment of the run, then --resume, and SIGKILL again",
            resumable,
            _killed,
            True,
            KILLS,
            QUICK_KILLS,
        ),
    ]


def first_record(bench: Bench, process: subprocess.Popen[str], records: int = 1) -> Path:
    """Wait until the results file has so many records."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and process.poll() is None:
        for path in bench.results():
            try:
                found = begun(path)
            except StoreError:
                continue
            if found and len(found.records) >= records:
                return path
        time.sleep(0.01)
    raise Wrong("not told", f"no record in time: {done(process)}")


def _next_run(bench: Bench) -> None:
    """Wait until a run is on: it has a folder, which goes before its record is written."""
    end = time.monotonic() + WAIT_S
    while not list(bench.temporary.glob("zerobench-*/run-*")) and time.monotonic() < end:
        time.sleep(0.005)


def stopped(process: subprocess.Popen[str], signals: list[int], code: int, gap_s: float = 0.3) -> str:
    """Send the signals; what it said to the end. Raises `Wrong` where it ends otherwise than with `code`, or late."""
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(gap_s if len(signals) > 1 else 0)
    found, out, err = done(process)
    if found != code or "Traceback" in err:
        raise Wrong("not told", f"exit code {found}, not {code}: {err[-600:]}")
    if time.monotonic() - began > STOP_S:
        raise Wrong("not told", f"it took {time.monotonic() - began:.1f} s to end")
    if re.search(r"^\S+ .*\bpass$", out, re.MULTILINE) and "not run" in out:
        raise Wrong("wrong verdict", out[-600:])
    return err


def _last(err: str) -> str:
    return next((line for line in reversed(err.splitlines()) if "stopped by" in line), "")


def _once(bench: Bench) -> str:
    alone = bench.apart("once")
    process = alone.start(*SUITE)
    path = first_record(alone, process)
    _next_run(alone)
    err = stopped(process, [signal.SIGINT], 130)
    if "once more to stop now" not in err or "--resume" not in _last(err):
        raise Wrong("not told", err[-600:])
    number = kept(path, err)
    if number < 2:
        raise Wrong("case lost", "the run that was on is not in the file")
    if bench.whole:
        resumed(alone, path)
    return _seen(alone, _last(err))


def _twice(bench: Bench) -> str:
    """The second run hangs; its deadline is a minute away."""
    alone = bench.apart("twice")
    _hanging_suite(alone)
    process = alone.start("run", "hanging.yaml")
    path = first_record(alone, process)
    time.sleep(1)
    err = stopped(process, [signal.SIGINT, signal.SIGINT], 130)
    if kept(path, err) != 1 or "--resume" not in _last(err):
        raise Wrong("not told", err[-600:])
    return _seen(alone, _last(err))


def _hanging_suite(bench: Bench) -> None:
    """The first run is good, and the second hangs."""
    text = (bench.folder / "short.yaml").read_text().replace("suite: short", "suite: hanging")
    text = re.sub(r"checks: .*", "checks: [memory.at_rest]", text.replace("[ddp, zero2]", f"[zero2, '{FAULTY}']"))
    text += f"options: {{'{FAULTY}': {{fault: 'children-hang', at: step}}}}\n"
    (bench.folder / "hanging.yaml").write_text(text)


def _by(number: signal.Signals) -> Callable[[Bench], str]:
    def act(bench: Bench) -> str:
        alone = bench.apart(number.name)
        process = alone.start(*SUITE)
        path = first_record(alone, process)
        err = stopped(process, [number], 128 + number)
        if number.name not in _last(err) or "--resume" not in _last(err):
            raise Wrong("not told", err[-600:])
        kept(path, err)
        if bench.whole:
            resumed(alone, path)
        return _seen(alone, _last(err))

    return act


def _ignored(bench: Bench) -> str:
    alone = bench.apart("nohup")
    process = alone.start(*SUITE, before=("nohup",))
    path = first_record(alone, process)
    process.send_signal(signal.SIGHUP)
    code, _, err = done(process)
    if code or kept(path, err) != RUNS:
        raise Wrong("case lost", f"exit code {code}: {err[-600:]}")
    return _seen(alone, "all runs, exit code 0")


def _at_once(bench: Bench) -> str:
    alone = bench.apart("at-once")
    process = alone.start(*SUITE)
    end = time.monotonic() + WAIT_S
    while not alone.results() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    err = stopped(process, [signal.SIGTERM], 143)
    (path,) = alone.results()
    kept(path, err)
    resumed(alone, path)
    return _seen(alone, _last(err))


def _fork_server(bench: Bench) -> int:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        for pid in bench.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if b"zerobench.launch.server" in command and parent in bench.own:
                    return pid
            except OSError:
                continue
        time.sleep(0.01)
    raise Wrong("not told", "there is no fork server")


def _server(bench: Bench) -> str:
    alone = bench.apart("server")
    _hanging_suite(alone)
    process = alone.start("run", "hanging.yaml")
    path = first_record(alone, process)
    time.sleep(1)
    alone.own = {process.pid}
    os.kill(_fork_server(alone), signal.SIGKILL)
    code, _, err = done(process)
    if code != 3 or "fork server is gone" not in err or "--resume" not in err or kept(path, err) != 1:
        raise Wrong("not told", f"exit code {code}: {err[-600:]}")
    return _seen(alone, err.strip().splitlines()[-2])


def _server_between(bench: Bench) -> str:
    bench.launch()
    pid = bench.local.server_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    record = bench.launch()
    if record.status != "ok" or bench.local.server_pid == pid:
        raise Wrong("wrong verdict", record.reason)
    return "nothing: the next run completes"


def _seen(bench: Bench, said: str) -> str:
    """`said`, once nothing of the bench is left. The folder's name is not the user's."""
    if left := bench.left():
        raise Wrong("process left" if "process" in left else "file left", left)
    return said.replace(str(bench.folder) + "/", "")


def _killed(bench: Bench) -> str:
    undisturbed(bench)
    chains = 2 if bench.whole else 1
    times = (KILLS if bench.whole else QUICK_KILLS) // chains
    with ThreadPoolExecutor(chains) as pool:
        parts = list(pool.map(lambda i: _kills(bench, times, SEED + i), range(chains)))
    kills, early, ends = (sum(column) for column in zip(*parts, strict=True))
    if bench.whole and not 0 < early < kills:
        raise Wrong("not told", f"of {kills} kills {early} came before the first record: they do not cover the run")
    return (
        f"{kills} kills, {early} of them before the first record; {ends} runs gone on with to the undisturbed verdict"
    )


def _kills(bench: Bench, times: int, seed: int) -> tuple[int, int, int]:
    """Kills, those of them before the first record of a file, and runs that came to their end.

    Start, kill, look, go on with what is there, kill again; a run that comes to its end before is looked at, and the next
    begins anew.
    """
    dice, alone = random.Random(seed), bench.apart("kills")
    want, whole_s = undisturbed(bench), undisturbed_s(bench)
    path: Path | None = None
    kills = ends = early = 0
    while kills < times:
        before = set(alone.results())
        process = alone.start(*SUITE, "--json", "verdict.json", *(("--resume", str(path)) if path else ()))
        timer = threading.Timer(dice.uniform(0, whole_s), process.kill)
        timer.start()
        code, _, err = done(process)
        timer.cancel()
        if left := alone.left():
            raise Wrong("process left" if "process" in left else "file left", left)
        path = path or next(iter(set(alone.results()) - before), None)
        if code == -signal.SIGKILL:
            kills += 1
            early += not (path and kept(path, err))
            continue
        if code or read(alone.folder / "verdict.json") != want:
            raise Wrong("wrong verdict", f"exit code {code}: {err[-600:]}")
        ends, path = ends + 1, None
    if path:
        resumed(alone, path)
        ends += 1
    return kills, early, ends
