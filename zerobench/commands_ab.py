"""`zerobench ab`, and `zerobench serve`, by which it launches through another interpreter."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import zerobench
from zerobench import accelerators
from zerobench.ab import Runs, Side, cases_json, compare, judge_stored, suite_of
from zerobench.accelerators import automatic
from zerobench.case import Case, Run
from zerobench.checks.pairs import SIDES
from zerobench.finding import Finding, Verdict
from zerobench.implementations.registry import absolute, names
from zerobench.launch.elsewhere import Elsewhere, serve
from zerobench.launch.local import LaunchError, Local
from zerobench.loader import did_you_mean
from zerobench.models.sizes import SIZES
from zerobench.provenance import collect
from zerobench.readings import SHARED_GPU
from zerobench.report.ab import ab_lines
from zerobench.report.progress import Progress
from zerobench.report.text import colourful
from zerobench.runner import Infrastructure
from zerobench.store import Results, StoreError
from zerobench.suite import implementation_name
from zerobench.terms import PRECISIONS

DEADLINE_S = 60.0


def ab(arguments: Namespace) -> tuple[Verdict, int]:
    """The verdict, and the exit code of the signal that stopped it, or 0. Raises ValueError for what cannot be asked,
    and Infrastructure.

    A comparison has one question, so its answer counts whatever the check's level is.
    """
    runs = plan(arguments)
    pythons = {side: getattr(arguments, f"{side}_python") for side in SIDES}
    try:
        with ExitStack() as stack:
            local = stack.enter_context(Local())
            sides: dict[str, Side] = {}
            for side in SIDES:
                sides[side] = _side(side, pythons[side], local, stack, runs)
            done = compare(
                runs,
                sides,
                results=Path(arguments.results),
                progress=Progress(0, sys.stderr, quiet=arguments.quiet),
                deadline_s=arguments.deadline or DEADLINE_S,
                rounds=arguments.rounds,
            )
    except (LaunchError, StoreError) as error:
        raise Infrastructure(str(error)) from None
    verdict = _say(done.findings)
    print(f"results: {done.path}", file=sys.stderr)
    return verdict, done.interrupted


def plan(arguments: Namespace) -> Runs:
    """(base, head) for each cell. Raises ValueError for a name that is not known."""
    words = (("model", arguments.model, tuple(SIZES)), ("precision", arguments.precision, PRECISIONS))
    for what, given, there in words:
        for word in given:
            if word not in there:
                raise ValueError(f"unknown {what} {word!r}{did_you_mean(word, there)}; known: {', '.join(there)}")
    known = [entry.name for entry in names()]
    for side in SIDES:
        reference = getattr(arguments, side)
        if ":" not in reference and reference not in known and not getattr(arguments, f"{side}_python"):
            near = did_you_mean(reference, known)
            raise ValueError(f"unknown implementation {reference!r}{near}; known: {', '.join(known)}")
    if arguments.device == SHARED_GPU:
        raise ValueError("ranks that share a GPU wait for each other: how long they take says nothing")
    device = automatic(arguments.world_size) if arguments.device == "auto" else arguments.device
    scenario = "timed-sgd" if arguments.optimizer_free else "timed"

    def run(reference: str, model: str, n: int, precision: str) -> Run:
        case = Case(implementation_name(reference), absolute(reference), model, n, precision, device=device)
        return case.run(scenario)

    return [
        (run(arguments.base, model, n, precision), run(arguments.head, model, n, precision))
        for model in arguments.model
        for precision in arguments.precision
        for n in arguments.world_size
    ]


def _side(side: str, python: str | None, local: Local, stack: ExitStack, runs: Runs) -> Side:
    suite, cases = suite_of(side), cases_json(runs)[side]
    cards = accelerators.provenance() if runs[0][0].case.device != "cpu" else {}
    if python is None:
        return Side(local, collect(suite=suite, suite_digest="", cases=cases, **cards))
    elsewhere = stack.enter_context(Elsewhere(Path(python), suite))
    return Side(elsewhere, replace(elsewhere.about, cases=cases, **cards))


def rejudged(results: Results) -> Verdict:
    """The verdict of a stored comparison, printed. Raises StoreError."""
    return _say(judge_stored(results))


def _say(findings: list[Finding]) -> Verdict:
    print("\n".join(ab_lines(findings, colourful(sys.stdout))))
    return Verdict(tuple(findings), strict=True)


def served(arguments: Namespace) -> int:
    """Answer on what was standard output; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The commit is that of the code which runs here, wherever it was started.
    about = collect(suite=arguments.suite, suite_digest="", folder=Path(zerobench.__file__).parent)
    with answers:
        serve(about, sys.stdin, lambda line: print(line, file=answers, flush=True))
    return 0
