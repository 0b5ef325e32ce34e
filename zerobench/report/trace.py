"""One traced step of a run as a file for Perfetto (ui.perfetto.dev) or chrome://tracing, in the Trace Event format.

A process a rank. Of each: `live bytes` by category as counters, phases and what the suite does between them as slices
with the units' boundaries as instants, and collectives as slices, on as many tracks as run beside one another.
Times are microseconds from the first event on any rank. Format: "Trace Event Format", Google, sections "Complete
Events", "Counter Events", "Instant Events" and "Metadata Events".
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerobench.case import Run
from zerobench.report.text import clean

Event = dict[str, Any]
PHASES, COLLECTIVES = 1, 10
"""Track numbers: of the phases, and the first of the collectives'."""


def trace_of(run: Run, ranks: Mapping[int, Sequence[Event]], backend: str) -> dict[str, Any]:
    """The whole file of a run, from the events that each rank left (`probes.steptrace`; nanoseconds)."""
    start = min((int(e["ts"]) for events in ranks.values() for e in events), default=0)
    found: list[Event] = []
    names: list[Event] = []
    for rank, events in sorted(ranks.items()):
        names += [_named("process_name", rank, 0, f"rank {rank}"), _named("process_sort_index", rank, 0, rank)]
        names.append(_named("thread_name", rank, PHASES, "phases"))
        lanes: list[int] = []  # when each track of collectives is free again
        for event in sorted(events, key=lambda e: int(e["ts"])):
            track = PHASES
            if event.get("track") == "collectives":
                track = COLLECTIVES + _lane(lanes, event)
            found.append(_event(event, rank, track, start))
        names += [
            _named("thread_name", rank, COLLECTIVES + lane, f"collectives {lane + 1}") for lane in range(len(lanes))
        ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": clean(run.id),
            "made by": "zerobench run --trace",
            "times": "of a watched step: every operator is counted, so it is several times slower than a bare one; "
            "this launch is not the judged one",
            "bytes": "a storage counts under the model state that claims most of it at any moment of the step; "
            "unclaimed: activations, buckets, temporaries; backend: temporaries of the communication backend",
            "collectives": "from the issuing to the completion, or to the end of the issuing where that is all that is "
            'known: "ends" says which',
            "backend": clean(backend),
        },
        "traceEvents": [*names, *sorted(found, key=lambda e: (e["ts"], -e.get("dur", 0)))],
    }


def merge_folder(run: Run, folder: Path, backend: str) -> dict[str, Any] | None:
    """The trace of a run whose ranks left their files in `folder`; None where none did."""
    ranks = {
        rank: json.loads(path.read_text())
        for rank in range(run.case.world_size)
        if (path := folder / f"rank{rank}.json").is_file()
    }
    return trace_of(run, ranks, backend) if ranks else None


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Compressed, and the same bytes for the same trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    path.write_bytes(gzip.compress(body, mtime=0))


def file_name(run: Run) -> str:
    """A file name for a run: its id, with what a shell or a file system could take amiss replaced."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", run.case.id).strip("-.")[:120] + ".json.gz"


def _event(event: Event, rank: int, track: int, start: int) -> Event:
    kept = {k: v for k, v in event.items() if k not in ("track", "ts", "dur")}
    kept |= {"pid": rank, "tid": track, "ts": (int(event["ts"]) - start) / 1e3}
    if "dur" in event:
        kept["dur"] = int(event["dur"]) / 1e3
    return kept


def _lane(lanes: list[int], event: Event) -> int:
    """The first track that is free at the event's start; `lanes` then has it taken until the event's end."""
    start, end = int(event["ts"]), int(event["ts"]) + int(event["dur"])
    for lane, free in enumerate(lanes):
        if free <= start:
            lanes[lane] = end
            return lane
    lanes.append(end)
    return len(lanes) - 1


def _named(what: str, rank: int, track: int, value: object) -> Event:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "ts": 0, "args": {key: value}}
