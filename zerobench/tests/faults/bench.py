"""Where faults are tried: a launcher, a folder, a temporary directory and a mark by which every process is known."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerobench.case import Case
from zerobench.launch.local import Local
from zerobench.record import Record

MARK = "ZEROBENCH_FAULTS_MARK"
FAULTY = "zerobench.tests.faults.faulty:Faulty"
GONE_S = 15.0  # for processes to end after their parent was killed; longest while torch is being imported
TORCHS = "torchinductor_"  # torch's own cache, made when torch._dynamo is imported, and meant to stay
SHORT = """\
version: 1
suite: short
about: Four runs.
matrix:
  implementation: [ddp, zero2]
  model: [mlp-tiny]
  world_size: [2]
  precision: [fp32]
checks: [memory.at_rest, traffic.volume, numerics.gradient]
"""


@dataclass(eq=False)
class Bench:
    """A context manager. whole: the full matrix, not its quick part. local: one launcher for all rows of ranks."""

    folder: Path
    whole: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    local: Local = field(default_factory=Local)
    own: set[int] = field(default_factory=set)

    def __enter__(self) -> Bench:
        self._stack = contextlib.ExitStack()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:  # what is started here would ignore it too
                signal.signal(number, _nothing)
                self._stack.callback(signal.signal, number, signal.SIG_IGN)
        self._furnish()
        self._stack.enter_context(environment({**self.environ(), "TMPDIR": None}))
        self._stack.enter_context(temporary_directory(self.temporary))
        self._stack.enter_context(self.local)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _furnish(self) -> None:
        self.temporary.mkdir(parents=True)
        self.shared = set(os.listdir("/dev/shm"))
        (self.folder / "short.yaml").write_text(SHORT)

    def apart(self, name: str) -> Bench:
        """Another one in a folder of this, with a mark of its own: for commands only, without a launcher."""
        bench = Bench(self.folder / f"{name}-{uuid.uuid4().hex[:6]}", self.whole)
        bench._furnish()
        return bench

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def environ(self) -> dict[str, str]:
        """What is added to the environment of everything that is started here."""
        flood = 1 << 30 if self.whole else 64 << 20
        return {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "ZEROBENCH_FAULTS_FLOOD": str(flood),
            "ZEROBENCH_RANK_MEMORY": "700MB",
        }

    def launch(self, scenario: str = "plain", *, deadline_s: float = 60.0, n: int = 2, **options: Any) -> Record:
        case = Case("faulty", FAULTY, "mlp-tiny", n, options=options)
        return self.local.launch(case.run(scenario), deadline_s=deadline_s, suite="faults")

    def start(self, *words: str, **changes: Any) -> subprocess.Popen[str]:
        """`zerobench WORDS` in this bench's folder, as a user starts it."""
        return self.start_code(["-m", "zerobench", *words], **changes)

    def start_code(
        self, words: list[str], *, env: dict[str, str] | None = None, **changes: Any
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*changes.pop("before", ()), sys.executable, *words],
            cwd=changes.pop("cwd", self.folder),
            env=os.environ | self.environ() | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            **changes,
        )

    def run(self, *words: str, **changes: Any) -> tuple[int, str, str]:
        """The same, waited for: exit code, standard output, standard error."""
        return done(self.start(*words, **changes))

    def results(self) -> list[Path]:
        return sorted((self.folder / "results").glob("*.jsonl"))

    def processes(self) -> list[int]:
        """Everything that was started from here, by whomever, and still lives: but this process, the launcher's fork
        server, and `own`. Known by its environment, or by the number in its command line."""
        ours = {os.getpid(), self.local.server_pid, *self.own}
        wanted, number, out = f"{MARK}={self.mark}".encode(), str(int(self.mark, 16)).encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                marked = wanted in (folder / "environ").read_bytes() or number in (folder / "cmdline").read_bytes()
                if alive and marked and int(folder.name) not in ours:
                    out.append(int(folder.name))
        return out

    def left(self) -> str:
        """What of a fault is still there after a while, in words; "" for nothing. Ends what it finds."""
        end = time.monotonic() + GONE_S
        while (found := self._left()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _left(self) -> str:
        if pids := self.processes():
            return f"processes {pids}"
        own = {self.local._nursery._folder.name} if self.local._nursery._folder else set()
        if files := {name for name in os.listdir(self.temporary) if not name.startswith(TORCHS)} - own:
            return f"temporary files {sorted(files)}"
        if own and (runs := [p.name for p in self.local._nursery.folder.iterdir() if p.name != "checkpoints"]):
            return f"folders of runs {runs}"
        if (
            shared := {name for name in os.listdir("/dev/shm") if name.startswith(("torch", "psm", "zerobench"))}
            - self.shared
        ):
            return f"shared memory {sorted(shared)}"
        return ""


def _nothing(number: int, frame: object) -> None:
    pass


def done(process: subprocess.Popen[str], timeout_s: float = 600.0) -> tuple[int, str, str]:
    """Its exit code and what it said; killed where it does not end."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"zerobench did not end within {timeout_s:g} s: {err[-500:]}") from None
    return process.returncode, out, err


@contextlib.contextmanager
def environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        for name, value in changes.items():
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def temporary_directory(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
