"""Checkpoints that any number of ranks can read: pieces of parameters, by name.

A piece is a stretch of a flattened parameter, with all that its owner holds of it:

    {"start": its first element, "master": (k,) fp32, "state": {"exp_avg": (k,), "exp_avg_sq": (k,), "step": ()}}

Rank r of n writes one file, `rank-r-of-n.pt`, of the pieces that it owns. Who loads copies from all files what overlaps
with its own stretches: no element is computed with, so every bit survives, at another n, with other buckets and at
another stage. Padding is nobody's piece; a rank that owns nothing else writes a file without any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerobench.implementations.buckets import Bucket

Runs = Sequence[tuple[nn.Parameter, slice]]
"""The optimizer's parameters of a bucket, each a view of these elements of its master."""
State = MutableMapping[Any, Any]
"""torch.optim's: by parameter, then by name."""


class BadCheckpoint(ValueError):
    """A folder that cannot be loaded: says what is missing, or how it differs from the job."""


def write(folder: Path, rank: int, n: int, content: dict[str, Any]) -> None:
    torch.save(content, folder / f"rank-{rank}-of-{n}.pt")


def read(folder: Path, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank wrote, in their order. Tensors are mapped, not read: only what is copied from comes into memory.

    Raises BadCheckpoint where files are missing or are several saves', and where `job` is not what "job" in them says.
    """
    found = {path.name: path for path in folder.glob("rank-*-of-*.pt")}
    worlds = {int(match[1]) for name in found if (match := re.fullmatch(r"rank-\d+-of-(\d+)\.pt", name))}
    if len(worlds) != 1:
        raise BadCheckpoint(f"{folder} has checkpoints of {sorted(worlds) or 'no'} ranks; exactly one is needed")
    n = worlds.pop()
    names = [f"rank-{rank}-of-{n}.pt" for rank in range(n)]
    if absent := [name for name in names if name not in found]:
        raise BadCheckpoint(f"{folder} lacks {', '.join(absent)}")
    files = [torch.load(found[name], map_location="cpu", weights_only=True, mmap=True) for name in names]
    for what, ours in job.items():
        theirs = files[0]["job"].get(what)
        if theirs != ours:
            raise BadCheckpoint(f"{folder} has {what} {_other(theirs, ours)}; this job has {_other(ours, theirs)}")
    return files


def _other(mine: Any, yours: Any) -> Any:
    """`mine`; of a mapping what `yours` has not, or has otherwise."""
    if not (isinstance(mine, dict) and isinstance(yours, dict)):
        return mine
    return {key: value for key, value in mine.items() if key not in yours or yours[key] != value}


def pieces(bucket: Bucket, runs: Runs, state: State) -> dict[str, dict[str, Any]]:
    """What this rank owns of each of the bucket's parameters. Copies: a view would be saved with all of its storage."""
    found = {}
    for slot in bucket.slots:
        place = bucket.stretch(slot)
        if place.start < place.stop:
            view, within = _run_of(runs, place)
            states = {k: _cut(v, within).clone() for k, v in state.get(view, {}).items() if isinstance(v, Tensor)}
            start = bucket.first_element(slot)
            found[slot.name] = {"start": start, "master": bucket.master[place].clone(), "state": states}
    return found


def restore(bucket: Bucket, runs: Runs, state: State, files: Sequence[Mapping[str, Any]]) -> None:
    """Fill this rank's masters and optimizer state of a bucket. Raises BadCheckpoint where elements are missing."""
    for view, _ in runs:
        state.pop(view, None)
    for slot in bucket.slots:
        place = bucket.stretch(slot)
        if place.start >= place.stop:
            continue
        view, within = _run_of(runs, place)
        first, numel, seen = bucket.first_element(slot), place.stop - place.start, 0
        for piece in (file["pieces"][slot.name] for file in files if slot.name in file["pieces"]):
            low = max(first, piece["start"])
            high = min(first + numel, piece["start"] + piece["master"].numel())
            if low >= high:
                continue
            seen += high - low
            theirs = slice(low - piece["start"], high - piece["start"])
            bucket.master[place][low - first : high - first] = piece["master"][theirs]
            for key, value in piece["state"].items():
                if value.dim() == 0:  # a step count
                    state[view][key] = value.clone()
                else:
                    whole = state[view].setdefault(key, torch.zeros_like(view))
                    whole[within][low - first : high - first] = value[theirs]
        if seen != numel:
            raise BadCheckpoint(f"the checkpoint has {seen} of the {numel} elements of {slot.name} from {first} on")


def _run_of(runs: Runs, place: slice) -> tuple[nn.Parameter, slice]:
    """The optimizer's parameter that a stretch of the master lies in, and where in it."""
    for view, where in runs:
        if where.start <= place.start and place.stop <= where.stop:
            return view, slice(place.start - where.start, place.stop - where.start)
    raise LookupError(f"no parameter of the optimizer covers {place}")


def _cut(value: Tensor, within: slice) -> Tensor:
    return value if value.dim() == 0 else value[within]
