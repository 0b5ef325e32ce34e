"""Launches by another interpreter: another torch, or another checkout of zerobench, on this machine.

That interpreter's `zerobench serve` reads one line of JSON a launch and answers with one: an order goes down, a record
comes up, as everywhere. It lives as long as its input, so it ends with its parent, however that ends; and as long as it
lives its fork server stays warm, so that neither side of a comparison pays for the import of torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from zerobench.case import Run
from zerobench.launch.local import Local
from zerobench.launch.nursery import LaunchError
from zerobench.record import Provenance, Record

START_S = 60.0
SLACK_S = 200.0
"""What a launch may take beyond its deadline: the first one waits for torch to be imported."""


class Elsewhere:
    """A launcher as `Local` is one. A context manager; `close` ends its processes. about: what it says of itself.

    Raises LaunchError where `python` cannot be run, or is not one with a zerobench that can serve.
    """

    def __init__(self, python: Path, suite: str) -> None:
        self.python = python
        # -P: what is imported is that interpreter's, not what lies in the working directory.
        command = [str(python), "-P", "-m", "zerobench", "serve", suite]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(
                f"{python}: {error.strerror}; --base-python and --head-python name interpreters"
            ) from None
        try:
            self.about = Provenance.from_json(self._answer(START_S))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self, run: Run, *, deadline_s: float, suite: str = "") -> Record:
        """See `Local.launch`."""
        order = {"run": run.to_json(), "deadline_s": deadline_s, "suite": suite}
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except OSError:
            raise LaunchError(f"{self.python}: zerobench serve has ended") from None
        try:
            return Record.from_json(self._answer(deadline_s + SLACK_S))
        except ValueError as error:
            raise LaunchError(f"{self.python}: {error}") from None

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            answer = json.loads(line)
        except ValueError:
            what = f"answered {line[:80]!r}" if line else self._silence(timeout_s)
            raise LaunchError(f"{self.python}: zerobench serve {what}; is zerobench installed there?") from None
        if isinstance(answer, Mapping) and "error" in answer:
            raise LaunchError(f"{self.python}: {answer['error']}")
        return answer

    def _silence(self, timeout_s: float) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return f"did not answer within {timeout_s:.0f} s"
        return f"ended without an answer, exit code {code}"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it may have ended already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its fork server and ranks notice
            self._process.wait()
        self._process.stdout.close()


def serve(about: Provenance, orders: TextIO, answer: Callable[[str], None]) -> None:
    """The other end: say what this is, then launch what is ordered until the orders end."""
    answer(json.dumps(about.to_json()))
    with Local() as local:
        local.warm()
        for line in orders:
            try:
                order = json.loads(line)
                run = Run.from_json(order["run"])
                record = local.launch(run, deadline_s=float(order["deadline_s"]), suite=str(order["suite"]))
                answer(json.dumps(record.to_json(), allow_nan=False))
            except (LaunchError, ValueError, TypeError, KeyError) as error:
                answer(json.dumps({"error": f"{type(error).__name__}: {error}"}))
