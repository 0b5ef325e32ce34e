"""Results that a page is made of, for tests: a small right one, and one whose every text is an attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zerobench.case import Case
from zerobench.codec import encode
from zerobench.finding import Verdict
from zerobench.judge import judge
from zerobench.record import Failure, Provenance, Record
from zerobench.report.page import html
from zerobench.tests.made import CASE, MODEL, record

CHECKS = ("memory.at_rest", "traffic.volume", "traffic.kinds", "time.step", "numerics.gradient", "runtime.completes")
ATTACKS = (
    "<script>window.stolen = 1</script>",
    "\"><img src=x onerror='window.stolen = 2'>",
    "' onmouseover='window.stolen = 3' x='",
    "</style></title></svg></desc></textarea><script>window.stolen = 4</script>",
    "]]><script>window.stolen = 5</script><!-- -->",
    "javascript:window.stolen=6",
    "{{ 7 * 7 }} ${window.stolen = 7} $x^2_3$ \\frac{1}{2}",
    "\x1b[2J\x1b]0;title\x07\r\nnew\x00line\u2028",
    "\u202egnirts desrever\u200f \U0001f600\U0001f469\u200d\U0001f52c",
    "<svg onload=window.stolen=8></svg><a href='http://example.invalid/'>x</a>",
)
HOSTILE = " ".join(ATTACKS)


def about(cases: tuple[Case, ...], **more: object) -> Provenance:
    made = Provenance(
        "p",
        "0.1",
        "made",
        "d" * 64,
        "host",
        "2030-01-02T03:04:05+00:00",
        python="3.11",
        torch="2.13.0",
        backend="gloo",
        cores=2,
        cases=tuple(encode(c) for c in cases),
        checks=CHECKS,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def page(
    made: Provenance, cases: tuple[Case, ...], records: Mapping[str, Record], verdict: Verdict | None = None
) -> str:
    verdict = verdict or judge(made.suite, cases, made.checks, records)
    launches = {id: [r] for id, r in records.items() if r.status == "ok"}
    return html(made, cases, records, launches, verdict, judged_by="paper", source="made.jsonl")


def right() -> tuple[Provenance, tuple[Case, ...], dict[str, Record]]:
    found = [record(scenario) for scenario in ("plain", "dyadic")]
    return about((CASE,)), (CASE,), {r.id: r for r in found}


def hostile() -> str:
    """The page of a result in which every text field of every kind of record is `HOSTILE`, a failed run among them."""
    bad = replace(CASE, implementation=HOSTILE, reference=HOSTILE, model=HOSTILE, options={HOSTILE: HOSTILE})
    plain = replace(CASE, implementation=HOSTILE, model=HOSTILE)
    good = record("plain", plain, suite=HOSTILE)
    named = tuple(
        replace(s, boundaries=tuple(replace(b, unit=HOSTILE) for b in s.boundaries), changed=(HOSTILE,))
        for s in good.samples
    )
    failure = Failure("raised", HOSTILE, phase=HOSTILE, step=1, stack=HOSTILE, last_call=HOSTILE)
    broken = replace(
        record("plain", bad, suite=HOSTILE, model=replace(MODEL, parameters={HOSTILE: 1200})),
        status="error",
        reason=HOSTILE,
    )
    broken = replace(broken, samples=tuple(replace(s, failure=failure) for s in broken.samples))
    skipped = replace(record("dyadic", bad), status="skip", reason=HOSTILE, samples=())
    records = {r.id: r for r in (replace(good, samples=named), broken, skipped)}
    records |= {bad.run("dyadic").id: replace(skipped, run=bad.run("dyadic"))}
    words = {name: HOSTILE for name in ("suite", "suite_digest", "host", "commit", "python", "torch", "backend")}
    words |= {name: HOSTILE for name in ("device", "driver", "cpu", "kernel", "interconnect", "started", "zerobench")}
    made = about((plain, bad), environment={HOSTILE: HOSTILE}, **words)
    verdict = judge(HOSTILE, (plain, bad), CHECKS, records)
    attacked = tuple(
        replace(f, requirement=HOSTILE, expected=HOSTILE, actual=HOSTILE, detail=(HOSTILE,), suite=HOSTILE)
        for f in verdict.findings
    )
    return page(made, (plain, bad), records, Verdict(attacked))
