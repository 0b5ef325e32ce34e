"""Chapter 5: it runs, it ends, and it leaves the house as it was."""

from __future__ import annotations

from zerobench.checks.check import Check, Judgement, NotApplicable, Unreliable, View, verdict
from zerobench.finding import Level
from zerobench.record import Failure, Record
from zerobench.scenarios import NOT_SIMULATED


def completes(view: View) -> Judgement:
    """No crash, no hang, nothing left changed, in any run of the case."""
    told = [r for r in view.records.values() if r.status != "invalid"]
    failures = [(r, s.rank, s.failure) for r in told for s in r.samples if s.failure]
    broken = [r for r in view.records.values() if r.status == "error"]
    changed = sorted({c for r in view.records.values() for s in r.samples for c in s.changed})
    apart = [r for r in view.records.values() if r not in told and any(s.failure for s in r.samples)]
    if apart and not broken:  # ranks that could not even meet
        raise Unreliable(f"{apart[0].run.scenario}: {apart[0].reason}")
    holds = not broken and not failures and not changed
    if holds and view.case.simulated:
        raise NotApplicable(NOT_SIMULATED)
    culprits = [f for f in failures if f[2].kind != "waiting"] or failures
    if culprits:
        record, rank, failure = culprits[0]
        actual = f"{record.run.scenario}: rank {rank} {failure_text(failure)}"
    elif broken:
        actual = f"{broken[0].run.scenario}: {broken[0].reason}"
    elif changed:
        actual = f"left changed: {'; '.join(changed)}"
    else:
        actual = f"{len(view.records)} runs completed"
    failed = dict.fromkeys(r.run.scenario for r in (*(c[0] for c in culprits), *broken))
    if len(failed) > 1:
        actual += f"; {len(failed)} of {len(view.records)} runs fail: {', '.join(failed)}"
    return Judgement(
        claim=verdict(holds),
        paper=verdict(holds),
        expected="every rank finishes, and global state is as before",
        actual=actual,
        ranks=tuple(sorted({rank for _, rank, _ in culprits})),
        detail=tuple(line for c in culprits[:2] for line in _lines(*c)),
    )


def failure_text(failure: Failure) -> str:
    at = f" in {failure.phase}" if failure.phase else ""
    at += f" of step {failure.step}" if failure.step >= 0 else ""
    return f"{failure.kind}{at}: {failure.what}"


def _lines(record: Record, rank: int, failure: Failure) -> list[str]:
    lines = [f"rank {rank}, last collective: {failure.last_call}"] if failure.last_call else []
    return lines + [f"  {line}" for line in failure.stack.strip().splitlines()[-12:]]


CHECKS = (
    Check(
        "runtime.completes",
        Level.MUST,
        "==",
        "no crash, no hang, no process left behind, no global state changed",
        "",
        (),
        completes,
        simulated="ranks",
    ),
)
