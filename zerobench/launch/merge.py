"""One run's outcomes, a rank each, into one Record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerobench.case import Run
from zerobench.codec import encode
from zerobench.launch.autopsy import End, blame, disagreed, failure, waited
from zerobench.launch.mismatch import Logs, disagreement, unanswered
from zerobench.rank import JOINING
from zerobench.record import Failure, Record, Sample

_SECONDARY = ("waiting", "stopped")


def merge(
    run: Run,
    ends: Sequence[End],
    *,
    suite: str,
    deadline_s: float,
    wall_s: float,
    logs: Logs | None = None,
    load: str = "",
    network: str = "on the loopback interface",
) -> Record:
    """`ends` in the order of ranks. A rank that did not answer has a sample with its failure and nothing else.

    logs: the last collectives of each rank. load: what kept the machine from its work, in words, if anything did.
    network: where the ranks were to meet, in words.
    """
    failures = {end.rank: found for end in ends if (found := failure(end, deadline_s)) is not None}
    late = any(found.kind in ("hung", "slow", "starved") for found in failures.values())
    failures = disagreed(failures, disagreement(logs or {})) if failures else failures
    failures = blame(failures)
    samples = tuple(_sample(end, failures.get(end.rank)) for end in ends)
    status, reason = _status(ends, failures, network)
    if late:
        apart = "" if any(found.kind == "mismatch" for found in failures.values()) else unanswered(logs or {})
        reason = "; ".join(part for part in (reason, apart, load) if part)
    first = ends[0].outcome
    return Record(
        suite=suite,
        run=run,
        status=status,
        reason=reason,
        claims=first.claims if first else None,
        model=first.model if first else None,
        samples=samples,
        wall_s=wall_s,
    )


def _sample(end: End, found: Failure | None) -> Sample:
    sample = end.outcome.sample if end.outcome else Sample(end.rank)
    return replace(sample, rank=end.rank, failure=found)


def _status(ends: Sequence[End], failures: dict[int, Failure], network: str) -> tuple[str, str]:
    if failures:
        if _apart(failures):
            return "invalid", f"the ranks could not meet {network}: {_complaint(ends, failures)}"
        if _starved(failures):
            return "invalid", f"the machine gave the ranks no time: {_complaint(ends, failures)}"
        return "error", _complaint(ends, failures)
    outcomes = {end.rank: end.outcome for end in ends if end.outcome is not None}
    if stranger := next(
        (f"rank {r} answered as rank {o.sample.rank}" for r, o in outcomes.items() if o.sample.rank != r), ""
    ):
        return "error", stranger
    unknown = {r: o.status for r, o in outcomes.items() if o.status not in ("ok", "skip", "invalid")}
    if unknown:
        return "error", "; ".join(f"rank {rank} answered with an unknown status, {s!r}" for rank, s in unknown.items())
    skipped = {rank: o.reason for rank, o in outcomes.items() if o.status == "skip"}
    if len(skipped) == len(outcomes):
        return "skip", "; ".join(dict.fromkeys(skipped.values()))
    if skipped:
        ran = [rank for rank in outcomes if rank not in skipped]
        return "error", f"{_ranks(list(skipped))} skipped ({next(iter(skipped.values()))}), {_ranks(ran)} did not"
    for field in ("claims", "model"):
        said = {rank: getattr(o, field) for rank, o in outcomes.items()}
        other = next((rank for rank in said if said[rank] != said[0]), None)
        if other is not None:
            return "error", f"the ranks' {field} differ: " + _difference(said[0], said[other], other)
    doubts = {rank: o.reason for rank, o in outcomes.items() if o.status == "invalid"}
    if doubts:
        return "invalid", "; ".join(dict.fromkeys(doubts.values()))
    return "ok", ""


def _apart(failures: dict[int, Failure]) -> bool:
    """Whether nothing failed but the joining: where ranks cannot reach each other, that says nothing about a subject."""
    own = [found for found in failures.values() if found.kind not in _SECONDARY] or list(failures.values())
    return all(
        found.phase == JOINING and found.kind in ("raised", "hung", "slow", "starved", "stopped") for found in own
    )


def _starved(failures: dict[int, Failure]) -> bool:
    """Whether ranks were late only because they had no core, and the others because they waited for those."""
    kinds = {found.kind for found in failures.values()}
    return "starved" in kinds and all(
        found.kind in ("starved", "waiting") or (found.kind in ("hung", "slow") and waited(found))
        for found in failures.values()
    )


def _difference(first: object, second: object, rank: int) -> str:
    mine, theirs = encode(first) or {}, encode(second) or {}
    names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
    sides = ((0, mine), (rank, theirs))
    return "; ".join(f"rank {r}: " + ", ".join(f"{n}={side.get(n)!r}" for n in names) for r, side in sides)


def _complaint(ends: Sequence[End], failures: dict[int, Failure]) -> str:
    """The failures that are nobody else's consequence, alike ones together; and which ranks left without the others."""
    own = {rank: found for rank, found in failures.items() if found.kind not in _SECONDARY} or failures
    alike: dict[str, list[int]] = {}
    for rank, found in sorted(own.items()):
        step = f", step {found.step}" if found.step >= 0 else ""
        where = f" ({found.phase}{step})" if found.phase else ""
        alike.setdefault(f"{found.kind}: {found.what}{where}", []).append(rank)
    parts = [f"{_ranks(ranks)} {text}" for text, ranks in alike.items()]
    done = [end for end in ends if end.rank not in failures and end.outcome]
    for status, verb in (("skip", "skipped"), ("ok", "finished"), ("invalid", "finished")):
        if leavers := [end.rank for end in done if end.outcome and end.outcome.status == status]:
            parts.append(f"{_ranks(leavers)} had {verb}")
    return "; ".join(parts)


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
