"""What each command does: between the words of the command line and the parts that do the work. Imports as it needs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.commands_explain import explain
from zerobench.commands_info import (
    doctor,
    fail,
    known,
    list_,
    note,
    predict,
    refuse,
    schema,
    spec,
    validate,
    write_lines,
)
from zerobench.commands_job import in_job
from zerobench.finding import Finding, Verdict
from zerobench.launch.job import command

if TYPE_CHECKING:
    from zerobench.case import Case
    from zerobench.launch.nodes import Nodes
    from zerobench.report.pen import Pen
    from zerobench.runner import Plan
    from zerobench.store import Results

DEADLINE_S = 60.0


def run(arguments: Namespace) -> int:
    return in_job(_run, arguments)


def _run(arguments: Namespace, nodes: Nodes | None) -> int:
    from zerobench.loader import BadFile
    from zerobench.report.terminal import summary_lines
    from zerobench.report.text import on_line
    from zerobench.runner import Infrastructure, Plan, execute
    from zerobench.suite import find, load

    plans = []
    for name in arguments.suite:
        try:
            for reference in arguments.implementation or ():
                checked(reference)
            suite = load(find(name), known())
            cases = suite.cases(arguments.implementation, arguments.world_size, arguments.select)
        except BadFile as error:
            return refuse(error)
        except (LookupError, ValueError, OSError) as error:
            return fail(str(error.args[0] if isinstance(error, LookupError) else error))
        if suite.launch == "torchrun" and nodes is None and not arguments.dry_run:
            return fail(f"{suite.path}: launch: torchrun wants ranks that torchrun or srun started: {command(name)}")
        if suite.launch == "simulate" and arguments.device not in ("auto", "cpu"):
            return fail(
                f"{suite.path}: launch: simulate has no device {arguments.device}: tensors have no memory there"
            )
        if cases:
            plans.append(
                Plan(
                    suite=suite.suite,
                    cases=tuple(_located(case, arguments.device) for case in cases),
                    checks=suite.selected_checks(cases, arguments.select),
                    judge=suite.judge,
                    excuses=tuple(x.to_json() for x in suite.xfail),
                    digest=suite.digest,
                    deadline_s=arguments.deadline or suite.deadline_s or DEADLINE_S,
                    launches=arguments.launches,
                )
            )
    if not plans:
        return fail(f"nothing selected by -k {arguments.select!r}; --dry-run without it prints the ids there are", 5)
    if arguments.dry_run:
        for plan in plans:
            print("\n".join(on_line(f"{plan.suite}::{case.id}") for case in plan.cases))
            print(f"{len(plan.cases)} cases, {len(plan.runs())} runs", file=sys.stderr)
        return 0
    if arguments.resume and len(plans) > 1:
        return fail("--resume goes on with one suite's results: name that suite alone")
    findings: list[Finding] = []
    interrupted = 0
    for plan in plans:
        try:
            done = execute(plan, arguments, nodes)
        except ValueError as error:
            return fail(str(error))
        except Infrastructure as error:
            return fail(str(error), 3)
        findings += done.verdict.findings
        interrupted = interrupted or done.interrupted
        if interrupted:
            break
    verdict = Verdict(tuple(findings), arguments.strict)
    if len(plans) > 1:
        print("\n".join(["", "all suites", *summary_lines(verdict, False)]))
    return _finish(verdict, arguments.json, interrupted=interrupted)


def conform(arguments: Namespace) -> int:
    return in_job(_conform, arguments)


def _conform(arguments: Namespace, nodes: Nodes | None) -> int:
    from zerobench.checks.catalogue import CHECKS
    from zerobench.loader import BadFile, did_you_mean
    from zerobench.models.sizes import SIZES
    from zerobench.runner import Infrastructure, execute
    from zerobench.terms import PRECISIONS

    for check in arguments.check or ():
        if check not in CHECKS:
            return fail(f"unknown check {check!r}{did_you_mean(check, CHECKS)}; zerobench list checks names them")
    for what, given, there in (
        ("model", arguments.model, tuple(SIZES)),
        ("precision", arguments.precision, PRECISIONS),
    ):
        for word in given:
            if word not in there:
                return fail(f"unknown {what} {word!r}{did_you_mean(word, there)}; known: {', '.join(there)}")
    try:
        checked(arguments.implementation)
        plan = _conform_plan(arguments)
    except BadFile as error:
        return refuse(error)
    except (ValueError, OSError) as error:
        return fail(str(error))
    try:
        done = execute(plan, arguments, nodes)
    except ValueError as error:
        return fail(str(error))
    except Infrastructure as error:
        return fail(str(error), 3)
    return _finish(done.verdict, arguments.json, interrupted=done.interrupted)


def _conform_plan(arguments: Namespace) -> Plan:
    from zerobench.accelerators import automatic
    from zerobench.case import Case
    from zerobench.checks.catalogue import CHECKS
    from zerobench.runner import Plan
    from zerobench.suite import implementation_name, load_xfails

    options = {}
    for item in arguments.option:
        key, found, value = item.partition("=")
        if not found or not key.isidentifier():
            raise ValueError(f"--option {item!r}: write it as K=V")
        options[key] = _value(value)
    excuses = load_xfails(arguments.xfails) if arguments.xfails else ()
    device = automatic(arguments.world_size) if arguments.device == "auto" else arguments.device
    cases = tuple(
        _located(
            Case(
                implementation_name(arguments.implementation),
                arguments.implementation,
                model,
                n,
                precision,
                options=options,
            ),
            device,
        )
        for model in arguments.model
        for precision in arguments.precision
        for n in arguments.world_size
    )
    return Plan(
        suite="conform",
        cases=cases,
        checks=tuple(arguments.check or CHECKS),
        judge=arguments.judge,
        excuses=tuple(x.to_json() for x in excuses),
        digest="",
        deadline_s=arguments.deadline or DEADLINE_S,
    )


def report(arguments: Namespace) -> int:
    if not arguments.html:
        return _report(arguments, None)
    from zerobench.report.pen import Pen

    with Pen(beside=2) as pen:  # they get ready while the result is read
        return _report(arguments, pen)


def _report(arguments: Namespace, pen: Pen | None) -> int:
    from zerobench.ab import is_ab
    from zerobench.case import Case
    from zerobench.commands_report import write
    from zerobench.judge import judge
    from zerobench.report.terminal import verdict_lines
    from zerobench.report.text import colourful
    from zerobench.store import StoreError, read, settled

    try:
        results = read(Path(arguments.result))
    except StoreError as error:
        return fail(str(error))
    for problem in results.problems:
        note(problem)
    if is_ab(results):
        return _report_ab(arguments, results)
    about = results.provenance
    with settled():
        cases = [Case.from_json(dict(case)) for case in about.cases]
        verdict = judge(
            about.suite,
            cases,
            about.checks,
            results.records,
            by=arguments.judge or about.judge,
            excuses=about.xfail,
            strict=arguments.strict,
        )
        print("\n".join(verdict_lines(verdict, cases, results.records, colourful(sys.stdout))))
        if (code := write(arguments, results, cases, verdict, pen)) != 0:
            return code
        return _finish(verdict, arguments.json)


def _report_ab(arguments: Namespace, results: Results) -> int:
    from zerobench.commands_ab import rejudged  # with all that launches: not for a report of anything else
    from zerobench.store import StoreError

    try:
        verdict = rejudged(results)
    except StoreError as error:
        return fail(str(error))
    if arguments.html or arguments.markdown:
        return fail(f"{results.path}: a comparison of step times has no page; it is printed above")
    return _finish(verdict, arguments.json)


def matrix(arguments: Namespace) -> int:
    from zerobench.report.matrix import json_lines, matrix_of
    from zerobench.report.matrix_html import html_page
    from zerobench.report.matrix_markdown import markdown_lines
    from zerobench.store import StoreError

    try:
        found = matrix_of(Path(result) for result in arguments.result)
    except StoreError as error:
        return fail(str(error))
    try:
        if arguments.html:
            Path(arguments.html).write_text(html_page(found), encoding="utf-8")
        if arguments.output:
            write_lines(arguments.output, markdown_lines(found))
        if arguments.json:
            write_lines(arguments.json, json_lines(found))
    except OSError as error:
        return fail(f"{error.filename}: cannot be written: {error.strerror}; name another file", 3)
    if not (arguments.output or arguments.html or arguments.json):
        print("\n".join(markdown_lines(found)))
    return 0


def accept(arguments: Namespace) -> int:
    from zerobench.commands_baseline import Refused, accepted

    try:
        print("\n".join(accepted(arguments)))
    except Refused as refusal:
        return fail(str(refusal), refusal.code)
    return 0


def compare(arguments: Namespace) -> int:
    from zerobench.commands_baseline import Refused, compared
    from zerobench.report.run_markdown import append_summary, compare_lines

    try:
        verdict = compared(arguments)
    except Refused as refusal:
        return fail(str(refusal), refusal.code)
    if problem := append_summary(lambda: compare_lines(verdict, arguments.result), arguments.result):
        note(problem)
    return _finish(verdict, arguments.json)


def history(arguments: Namespace) -> int:
    from zerobench.commands_history import Refused, judged

    try:
        verdict = judged(arguments)
    except Refused as refusal:
        return fail(str(refusal))
    return _finish(verdict, arguments.json)


def ab(arguments: Namespace) -> int:
    from zerobench import commands_ab
    from zerobench.runner import Infrastructure

    try:
        verdict, interrupted = commands_ab.ab(arguments)
    except ValueError as error:
        return fail(str(error))
    except Infrastructure as error:
        return fail(str(error), 3)
    return _finish(verdict, arguments.json, interrupted=interrupted)


def serve(arguments: Namespace) -> int:
    from zerobench.commands_ab import served

    return served(arguments)


def selftest(arguments: Namespace) -> int:
    from zerobench.selftest import selftest as run_selftest

    return run_selftest(arguments)


def checked(reference: str) -> None:
    """Raises ValueError for an implementation that cannot be there, or be told from others: an unknown name, one that is
    registered twice or cannot stand in ids, a file that is not."""
    import re

    from zerobench.implementations.registry import BadPlugin, find
    from zerobench.suite import implementation_name

    place, colon, _ = reference.rpartition(":")
    if not colon:
        try:
            find(reference)
        except BadPlugin as error:
            raise ValueError(str(error)) from None
    if not re.fullmatch(r"[a-z0-9-]+", implementation_name(reference)):
        raise ValueError(
            f"implementation {reference!r}: names that stand in ids are of [a-z0-9-]+; "
            "give it such a name where it is registered, or in its class"
        )
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise ValueError(f"implementation {reference!r}: there is no file {place}")


def _located(case: Case, device: str = "auto") -> Case:
    """The case with a path of its reference made absolute, since ranks may start elsewhere; on `device`, if not auto."""
    from dataclasses import replace

    from zerobench.implementations.registry import absolute

    where = case.device if device == "auto" else device  # type: ignore[attr-defined]
    return replace(case, reference=absolute(case.reference), device=where)


def _value(text: str) -> object:
    """An option's value as YAML 1.2 would read a scalar: a number or true/false where it looks like one."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _finish(verdict: Verdict, json_path: str | None, *, interrupted: int = 0) -> int:
    if json_path:
        try:
            write_lines(json_path, [json.dumps(f.to_json(), allow_nan=False) for f in verdict.findings])
        except OSError as error:
            return fail(f"--json {json_path}: cannot be written: {error.strerror}; name another file", 3)
    return verdict.exit_code(interrupted=interrupted)


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "run": run,
    "conform": conform,
    "report": report,
    "matrix": matrix,
    "accept": accept,
    "compare": compare,
    "history": history,
    "ab": ab,
    "serve": serve,
    "list": list_,
    "validate": validate,
    "predict": predict,
    "explain": explain,
    "doctor": doctor,
    "schema": schema,
    "spec": spec,
    "selftest": selftest,
}
