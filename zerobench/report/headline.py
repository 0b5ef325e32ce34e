"""A verdict in one sentence, and the few numbers behind it. What a reader sees first, on a page and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerobench.case import Case
from zerobench.finding import Finding, Level, Status, Verdict
from zerobench.report.terminal import LOUD

WRONG = (Status.FAIL, Status.XPASS)


@dataclass(frozen=True)
class Headline:
    """tone: "good", "bad" or "doubt". sentence: the answer. counts: how many findings of each status, in words."""

    tone: str
    sentence: str
    counts: tuple[tuple[str, int], ...]


def headline(verdict: Verdict, cases: Sequence[Case] = (), subject: str = "cases") -> Headline:
    """The answer to "does it keep its promises?", the worst news first."""
    counts = verdict.counts()
    listed = tuple(
        (s.value, counts[s.value]) for s in (*LOUD, Status.XFAIL, Status.PASS, Status.SKIP) if counts[s.value]
    )
    held = [f for f in verdict.findings if f.level is Level.MUST or (f.level is Level.SHOULD and verdict.strict)]
    wrong = [f for f in held if f.status in WRONG]
    doubtful = [f for f in verdict.findings if f.status is Status.ERROR]
    doubtful += [f for f in held if f.status in (Status.INVALID, Status.INCONCLUSIVE, Status.MISSING)]
    total = len(cases) or len({f.case for f in verdict.findings})
    if wrong:
        where = len({f.case for f in wrong})
        checks = list(dict.fromkeys(f.check for f in wrong))
        named = ", ".join(checks[:4]) + (f" and {len(checks) - 4} more checks" if len(checks) > 4 else "")
        what = f"Not all promises are kept: {where} of {_number(total, subject)} {'fails' if where == 1 else 'fail'} {named}"
        if doubtful:
            what += f"; {_number(len(doubtful), 'findings')} could not be judged"
        return Headline("bad", f"{what}.", listed)
    if doubtful:
        return Headline(
            "doubt", f"Nothing failed, but {_number(len(doubtful), 'findings')} could not be judged.", listed
        )
    if not verdict.findings or all(f.status is Status.SKIP for f in verdict.findings):
        return Headline("doubt", "Nothing was judged: no check applied.", listed)
    known = counts[Status.XFAIL.value]
    but = f", but for {_number(known, 'known deviations')}" if known else ""
    minor = sum(f.status is Status.FAIL for f in verdict.findings)
    if minor:
        but += f"; {_number(minor, 'recommendations')} (SHOULD) {'is' if minor == 1 else 'are'} not met"
    every = f"All {total} {subject} keep" if total != 1 else f"The {subject.removesuffix('s')} keeps"
    return Headline("good", f"{every} {'their' if total != 1 else 'its'} promises{but}.", listed)


def loud(findings: Sequence[Finding]) -> list[Finding]:
    """What must be read in full, failures before doubts."""
    order = list(dict.fromkeys((*WRONG, *LOUD)))
    return sorted((f for f in findings if f.status in LOUD), key=lambda f: order.index(f.status))


def skips(findings: Sequence[Finding]) -> list[tuple[str, dict[str, int]]]:
    """Why what did not apply did not: reason, and how often by check; the most frequent reason first."""
    reasons: dict[str, dict[str, int]] = {}
    for finding in findings:
        if finding.status is Status.SKIP:
            checks = reasons.setdefault(finding.actual or "no reason given", {})
            checks[finding.check] = checks.get(finding.check, 0) + 1
    return sorted(reasons.items(), key=lambda item: -sum(item[1].values()))


def _number(count: int, plural: str) -> str:
    return f"{count} {plural.removesuffix('s') if count == 1 else plural}"
