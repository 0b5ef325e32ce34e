"""Progress of a run: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from zerobench.record import Record
from zerobench.report.text import colourful, on_line, paint


class Progress:
    """Tells `stream` which run of how many is on, and what became of each."""

    def __init__(self, total: int, stream: TextIO, *, quiet: bool = False) -> None:
        self.total, self.stream, self.quiet = total, stream, quiet
        self.live = stream.isatty()
        self.colour = colourful(stream)
        self.done = 0
        self.began = time.monotonic()

    def begin(self, run_id: str) -> None:
        if self.live and not self.quiet:
            spent = time.monotonic() - self.began
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done >= 3 else ""
            self._rewrite(f"[{self.done + 1}/{self.total}] {on_line(run_id)}{left}")

    def end(self, record: Record) -> None:
        self.done += 1
        if self.quiet:
            return
        word = {"ok": "", "skip": "skipped", "error": "FAILED", "invalid": "INVALID"}[record.status]
        line = f"[{self.done}/{self.total}] {on_line(record.id)}  {record.wall_s:.2f} s"
        if word:
            shade = "red" if record.status == "error" else "yellow"
            line += f"  {paint(word, shade, self.colour)}: {on_line(record.reason)[:200]}"
        if not self.live:
            print(line, file=self.stream, flush=True)
        elif word in ("FAILED", "INVALID"):
            self._rewrite("")
            print(line, file=self.stream, flush=True)

    def finish(self) -> None:
        if self.live and not self.quiet:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=self.stream, flush=True)
