"""Why a rank did not finish, and who kept the others waiting: from its exit code, its stacks and its last note.

When one rank of a collective fails, the others fail with it, later and louder. `blame` tells them apart.
"""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerobench.launch import blackbox, ranks
from zerobench.rank import Outcome
from zerobench.record import Failure

EXCERPT_LINES, EXCERPT_CHARACTERS = 30, 4000

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_MACHINERY = f'  File "{ranks.__file__}"'
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|timed ?out|timeout|gloo/transport"
    r"|remote process exited|NCCL (communicator was aborted|error: remote)|failed to recv|wait_for_workers",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """What the launcher knows of a rank when it is over.

    outcome: what it answered, or None. code: its exit code, -9 for SIGKILL. cut: "hung" or "stopped" where the launcher
    ended it (at the deadline; because another rank had failed), "garbled" where its answer cannot be read. note,
    stacks, output: the last of each.
    """

    rank: int
    outcome: Outcome | None
    code: int | None = None
    cut: str = ""
    note: str = ""
    stacks: str = ""
    output: str = ""


def failure(end: End, deadline_s: float) -> Failure | None:
    """Why this rank did not finish, or None if it did. Where the worker left a field empty, the black box fills it."""
    if end.outcome is not None:
        found = end.outcome.sample.failure
        if found is None and end.outcome.status in ("error", "refused"):
            found = Failure("refused" if end.outcome.status == "refused" else "raised", end.outcome.reason)
        if found is None:
            return None
        stack = found.stack
    else:
        found = Failure(*_cause(end, deadline_s))
        stack = main_stack(end.stacks)
    phase, step, call = blackbox.parse(end.note)
    if found.kind != "refused" and end.output.strip():
        stack = "\n".join(part for part in (stack.rstrip(), "last output:", excerpt(end.output)) if part)
    if not found.phase:
        found = replace(found, phase=phase, step=step)
    return replace(found, stack=stack, last_call=found.last_call or call)


def _cause(end: End, deadline_s: float) -> tuple[str, str]:
    frame = top_frame(end.stacks)
    where = f", in {frame}" if frame else ""
    if end.cut == "hung":
        return "hung", f"no answer within {deadline_s:g} s{where}"
    if end.cut == "stopped":
        return "stopped", f"still running when another rank had failed{where}"
    if end.cut == "garbled":
        return "died", "what it answered cannot be read: something else wrote into the rank's channel"
    code = end.code if end.code is not None else 0
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return "died", f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return "died", f"exited with code {code} before it answered"


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
    if found.kind in ("hung", "stopped"):
        frame = _FRAME.search(found.stack)
        if frame is None:
            return False
        file, line = frame["file"], int(frame["line"])
        # The last: a backward whose C++ hooks wait. A backward that computes does not last until a deadline.
        inside = "torch/distributed/" in file or file.endswith("torch/autograd/graph.py")
        return inside or ".wait(" in linecache.getline(file, line)
    return found.kind == "raised" and _LOST_PEER.search(found.what) is not None


def main_stack(stacks: str) -> str:
    """From what faulthandler wrote: the stack of the thread that the signal reached, without our own frames."""
    _, mark, last = stacks.rpartition("Current thread ")
    own, _, _ = last.partition(_MACHINERY)
    return (mark + own).strip() if mark else stacks.strip()


def top_frame(stacks: str) -> str:
    """Where that thread was: "function (file.py:12)"; "" if it left no stack."""
    frame = _FRAME.search(main_stack(stacks))
    return f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})" if frame else ""


def excerpt(output: str) -> str:
    """The last lines that a rank printed."""
    return "\n".join(output.rstrip().splitlines()[-EXCERPT_LINES:])[-EXCERPT_CHARACTERS:]
