"""How a run is stopped from outside, and what is owed to who stops it: ranks ended, results kept, the exit code.

SIGTERM and SIGHUP end a run at once, but cleanly. The first SIGINT lets the run that is on be finished and recorded, the
second ends it at once. A signal that was ignored when zerobench began (nohup, a job in the background) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT
_LATER = "\nzerobench: stopping when this run is recorded; once more to stop now\n"


class Stop(KeyboardInterrupt):
    """A signal asks for the end, now. Wherever a KeyboardInterrupt is understood this is, and it knows its exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(stop: KeyboardInterrupt) -> int:
    """128 and the signal's number, as a shell has it."""
    return 128 + (stop.number if isinstance(stop, Stop) else signal.SIGINT)


def name(code: int) -> str:
    """The signal of an exit code above 128."""
    return signal.Signals(code - 128).name


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Stop`, once: what follows while the run is being ended is not to disturb it."""
    raised = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if number == signal.SIGHUP:
            _let_go_of_the_terminal()
        if not raised:
            raised = True
            raise Stop(number)

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            stack.enter_context(_handled(number, stop))
        yield


class Patience:
    """code: 0, and `INTERRUPTED` once somebody has asked for the end."""

    def __init__(self) -> None:
        self.code = 0


@contextlib.contextmanager
def patient() -> Iterator[Patience]:
    """The first SIGINT is kept in the `Patience`, for whoever runs a loop to look at; the second raises `Stop`, and what
    follows is ignored."""
    asked = Patience()
    raised = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not asked.code:
            asked.code = INTERRUPTED
            with contextlib.suppress(OSError):
                os.write(2, _LATER.encode())  # print may be what was interrupted
        elif not raised:
            raised = True
            raise Stop(number)

    with _handled(signal.SIGINT, stop):
        yield asked


@contextlib.contextmanager
def _handled(number: int, handler: object) -> Iterator[None]:
    """`handler` for a signal, for a while: in the main thread, and where the signal is not ignored."""
    before = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(number, before)


def _let_go_of_the_terminal() -> None:
    """Where the terminal has gone, what is still to be said goes nowhere, instead of failing."""
    for fd in (1, 2):
        try:
            os.write(fd, b"")
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args and error.args[0] == 5:  # EIO: it was a terminal and is hung up
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, fd)
                os.close(null)
        except OSError:
            continue
