"""Why a rank did not finish, and who kept the others waiting: from its exit code, its stacks and its last note.

When one rank of a collective fails, the others fail with it, later and louder. `blame` tells them apart.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerobench.codec import decode, encode
from zerobench.launch import blackbox, limits, ranks
from zerobench.launch.mismatch import Disagreement
from zerobench.rank import JOINING, Outcome
from zerobench.record import Failure

EXCERPT_LINES, EXCERPT_CHARACTERS = 30, 4000

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_MACHINERY = f'  File "{ranks.__file__}"'
_PROBES = str(Path(ranks.__file__).parents[1] / "probes") + os.sep
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|timed ?out|timeout|gloo/transport"
    r"|remote process exited|NCCL (communicator was aborted|error: remote)|failed to recv|wait_for_workers",
    re.IGNORECASE,
)
_BACKEND = re.compile(r"gloo|nccl|op\.preamble|ProcessGroup|distributed", re.IGNORECASE)


@dataclass(frozen=True)
class End:
    """What the launcher knows of a rank when it is over.

    outcome: what it answered, or None. code: its exit code, -9 for SIGKILL; None where the launcher ended one that had
    answered. cut: why the launcher ended it: "hung" (at the deadline), "slow" (at the deadline, but it got on),
    "starved" (the same, but the machine had given it no core for most of the time),
    "mismatch" (the ranks wait in different collectives, and nothing moves), "stopped" (another rank had failed),
    "garbled" (its answer cannot be read). note, stacks, output: the last of each. vital: what it was at, seen from
    outside. limit_nbytes: the memory that it was allowed.
    """

    rank: int
    outcome: Outcome | None
    code: int | None = None
    cut: str = ""
    note: str = ""
    stacks: str = ""
    output: str = ""
    vital: str = ""
    limit_nbytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = encode(replace(self, outcome=None))
        return body | {"outcome": self.outcome.to_json() if self.outcome else None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> End:
        end = decode(cls, data | {"outcome": None})
        return replace(end, outcome=Outcome.from_json(data["outcome"])) if data["outcome"] else end


def failure(end: End, deadline_s: float) -> Failure | None:
    """Why this rank did not finish, or None if it did. Where the worker left a field empty, the black box fills it."""
    if end.outcome is not None:
        found = end.outcome.sample.failure
        if found is None and end.code:
            found = Failure("died", f"{_death(end.code)} after it had answered, before the launcher let it go")
        if found is None and end.outcome.status in ("error", "refused"):
            found = Failure("refused" if end.outcome.status == "refused" else "raised", end.outcome.reason)
        if found is None:
            return None
        stack = found.stack
    else:
        found = Failure(*_cause(end, deadline_s))
        stack = main_stack(end.stacks)
    if end.outcome is None and (told := _last_words(end.output)):
        found = replace(found, what=f"{found.what}: {told}")
    if found.kind != "refused":
        found = replace(found, what=limits.ran_out(found.what, end.limit_nbytes))
    phase, step, call = blackbox.parse(end.note)
    if found.kind != "refused" and end.output.strip():
        stack = "\n".join(part for part in (stack.rstrip(), "last output:", excerpt(end.output)) if part)
    if not found.phase:
        found = replace(found, phase=phase, step=step)
    return replace(found, stack=stack, last_call=found.last_call or call)


def _cause(end: End, deadline_s: float) -> tuple[str, str]:
    frame = top_frame(end.stacks)
    where = f", in {frame}" if frame else ""
    seen = f"; {end.vital}" if end.vital else ""
    if end.cut in ("slow", "starved"):
        return end.cut, f"not done within {deadline_s:g} s{where}{seen}; --deadline gives it longer"
    if end.cut in ("hung", "mismatch"):
        return "hung", (f"no answer within {deadline_s:g} s" if end.cut == "hung" else "no answer") + where + seen
    if end.cut == "stopped":
        return "stopped", f"still running when another rank had failed{where}"
    if end.cut == "garbled":
        return "died", "what it answered cannot be read: something else wrote into the rank's channel"
    return "died", f"{_death(end.code or 0)} before it answered" if (end.code or 0) >= 0 else _death(end.code or 0)


def _death(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _last_words(output: str) -> str:
    """What C++ says when it ends a process for want of memory; it raises nothing in Python then."""
    return next((line.strip() for line in reversed(output.splitlines()[-5:]) if "bad_alloc" in line), "")


def disagreed(failures: Mapping[int, Failure], apart: Disagreement | None) -> dict[int, Failure]:
    """The same, with kind "mismatch" for the ranks that disagree on a collective and waited, or were refused by the
    backend: they wait for nobody's death."""
    return {
        rank: replace(found, kind="mismatch", what=apart.text, stack=f"{found.what}\n{found.stack}")
        if apart and rank in apart.ranks and (waited(found) or _refused(found))
        else found
        for rank, found in failures.items()
    }


def _refused(found: Failure) -> bool:
    """Whether it looks as if the backend had refused a call; gloo ends a process for some of what it does not like."""
    text = found.what if found.kind == "raised" else found.stack if "SIGABRT" in found.what else ""
    return _BACKEND.search(text) is not None


def blame(failures: Mapping[int, Failure]) -> dict[int, Failure]:
    """The same, with kind "waiting" for ranks that failed only because another did; if nobody stands out, unchanged."""
    culprits = [rank for rank, found in sorted(failures.items()) if found.kind != "stopped" and not waited(found)]
    if not culprits:
        return dict(failures)
    names = ("rank " if len(culprits) == 1 else "ranks ") + ", ".join(map(str, culprits))
    return {
        rank: replace(found, kind="waiting", what=f"for {names}: {found.what}")
        if rank not in culprits and waited(found)
        else found
        for rank, found in failures.items()
    }


def waited(found: Failure) -> bool:
    """Whether it looks like a rank that waited for others: a lost peer, or a stack that ends in a wait."""
    if found.kind in ("hung", "slow", "starved", "stopped"):
        frame = _frame(found.stack)
        if frame is None:
            return False
        file, line = frame["file"], int(frame["line"])
        # The last: a backward whose C++ hooks wait. A backward that computes does not last until a deadline.
        inside = "torch/distributed/" in file or file.endswith("torch/autograd/graph.py")
        return inside or ".wait(" in linecache.getline(file, line)
    if found.kind == "raised" and found.phase == JOINING:
        return True
    return found.kind == "raised" and _LOST_PEER.search(found.what) is not None


def main_stack(stacks: str) -> str:
    """From what faulthandler wrote: the stack of the thread that the signal reached, without our own frames; of the main
    thread, which comes last, where no signal did."""
    _, mark, last = stacks.rpartition("Current thread ")
    if not mark:
        _, mark, last = stacks.rpartition("Thread 0x")
    own, _, _ = last.partition(_MACHINERY)
    return (mark + own).strip() if mark else stacks.strip()


def top_frame(stacks: str) -> str:
    """Where that thread was: "function (file.py:12)"; "" if it left no stack."""
    frame = _frame(main_stack(stacks))
    return f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})" if frame else ""


def _frame(stack: str) -> re.Match[str] | None:
    """The innermost frame that is not a probe's: probes stand around what they watch."""
    frames = list(_FRAME.finditer(stack))
    return next((f for f in frames if not f["file"].startswith(_PROBES)), frames[0] if frames else None)


def excerpt(output: str) -> str:
    """The last lines that a rank printed."""
    return "\n".join(output.rstrip().splitlines()[-EXCERPT_LINES:])[-EXCERPT_CHARACTERS:]
