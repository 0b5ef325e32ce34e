"""Faults of a plug-in: answers of the wrong kind from every method, and modules that cannot be imported in peace.

A wrong answer is refused by the method's name, or a check fails; never does a run pass that did not do its work, and
never does an error of zerobench's own stand where the plug-in's fault should.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from zerobench.case import Case
from zerobench.finding import Status
from zerobench.judge import judge, plan
from zerobench.record import Record
from zerobench.report.terminal import finding_lines
from zerobench.tests.faults.bench import Bench
from zerobench.tests.faults.rank_rows import COMPLETES, completes
from zerobench.tests.faults.row import Row, Wrong
from zerobench.tests.faults.strange import ANSWERS, HOSTILE_NAMES, UNSURE

STRANGE = "zerobench.tests.faults.strange"
DEADLINE_S = 40.0
SMALL = ("--world-size", "2", "--model", "mlp-tiny", "--precision", "fp32", "--check", COMPLETES)
OWN = re.compile(r"zerobench/(?!tests/|implementations/)\w+\.py")
"""A place in zerobench's own code, which a plug-in's fault must not be blamed on."""

PLUGIN = """\
{before}
from zerobench.implementations.reference import Zero2

class Mine(Zero2):
    {body}
"""
IMPORTS = {
    "takes a minute": ("import time; time.sleep(60)", "pass", 1, "hung .*importing the implementation"),
    "calls sys.exit": ("import sys; sys.exit(0)", "pass", 1, "cannot be imported: SystemExit: 0"),
    "calls os._exit": ("import os; os._exit(0)", "pass", 1, "importing the implementation.*exited with code 0"),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", "pass", 1, "KeyboardInterrupt"),
    "prints without end": (
        "import os; [os.write(1, b'x' * 65536) for _ in range(int(os.environ['ZEROBENCH_FAULTS_FLOOD']) >> 16)]",
        "pass",
        0,
        "1 pass",
    ),
    "is no Python": ("class :", "pass", 1, "cannot be imported: SyntaxError"),
    "imports itself": ("import importlib; importlib.import_module('mine')", "pass", 0, "1 pass"),
    "recurses without end": ("def f(): f()\nf()", "pass", 1, "cannot be imported: RecursionError"),
    "has no class": ("Zero2 = None", "pass\ndel Mine", 1, "has no 'Mine'"),
    "has no name": ("", "name = None", 1, "needs a name of \\[a-z0-9-\\]\\+"),
    "has a name that is a path": ("", "name = '../../x'", 1, "needs a name of"),
    "has a name with markup": ("", "name = '<script>\\x1b[31m'", 1, "needs a name of"),
    "imports text": ("", "imports = 'os'", 1, "imports is a str 'os'"),
    "imports numbers": ("", "imports = (1,)", 1, "imports is a tuple \\(1,\\)"),
    "imports what is not there": ("", "imports = ('nowhere',)", 1, "No module named 'nowhere'"),
    "cannot be made": ("", "def __init__(self): raise ValueError('no')", 1, "cannot be made without arguments"),
    "lacks a method": ("", "build = None", 1, "lacks build\\(\\)"),
}
"""What the module does, a line of its class's body, the exit code, and what the command says."""


def rows() -> list[Row]:
    made = [
        Row(
            "a plug-in",
            f"{method}()",
            f"answers {', '.join(name for name, _, _ in answers)}",
            "the record, with what was refused",
            _answers(method),
            times=len(answers),
        )
        for method, answers in ANSWERS.items()
    ]
    return [
        *made,
        *(
            Row("a plug-in", f"its module {what}", f"it {what}", "the record", _imports(what), what == "calls os._exit")
            for what in IMPORTS
        ),
        Row(
            "a plug-in", "changes its job", "micro_batches, precision and features are others", "the verdict", _meddler
        ),
        Row(
            "a plug-in",
            "two with one name",
            "two distributions register one name; two files have a class of one name",
            "nothing is run",
            _twice,
            times=2,
        ),
        Row(
            "a plug-in",
            "names with / .. quotes, newlines, markup, control characters, emoji",
            "an entry point is named so",
            "nothing is run",
            _names,
            times=len(HOSTILE_NAMES),
        ),
    ]


def _answers(method: str) -> Callable[[Bench], str]:
    def act(bench: Bench) -> str:
        seen = [_answer(bench, method, name, says) for name, _, says in ANSWERS[method]]
        refused = sum(word == "refused" for word in seen)
        return (
            f"{refused} refused by name, {len(seen) - refused} judged: {seen[-1]}" if refused < len(seen) else "refused"
        )

    return act


def _answer(bench: Bench, method: str, name: str, says: str) -> str:
    kind, options = ("Strange", {"method": method, "answer": name})
    if method == "unavailable":
        kind, options = UNSURE[name], {}
    case = Case("strange", f"{STRANGE}:{kind}", "mlp-tiny", 2, options=options)
    check = says if re.fullmatch(r"[a-z]+\.[a-z_]+", says) else COMPLETES
    records: dict[str, Record] = {}
    for id, run in plan([case], [check]).items():
        records[id] = bench.local.launch(run, deadline_s=DEADLINE_S, suite="faults")
    where = f"{method}() answers {name}"
    if method == "unavailable":
        record = next(iter(records.values()))
        if record.status == "ok" or not re.search(says, record.reason):
            raise Wrong("wrong verdict", f"{where}: {record.status}: {record.reason}")
        return "refused"
    found = {f.check: f for f in judge("faults", [case], [check], records, by="claim").findings}
    told = " ".join(found[check].actual.split())
    if found[check].status is not Status.FAIL:
        raise Wrong("wrong verdict", f"{where}: {found[check].status.value}: {told}")
    if check == COMPLETES and not re.search(says, told):
        raise Wrong("not told", f"{where}: {told}")
    if OWN.search(told) or any("\x1b" in line or "\u202e" in line for line in finding_lines(found[check], False)):
        raise Wrong("not told", f"{where}: {told}")
    return "refused" if check == COMPLETES else f"{check} fails"


def _imports(what: str) -> Callable[[Bench], str]:
    before, body, code, says = IMPORTS[what]

    def act(bench: Bench) -> str:
        alone = bench.apart("plug-in")
        (alone.folder / "mine.py").write_text(PLUGIN.format(before=before, body=body))
        words = ["conform", "mine.py:Mine", *SMALL, "--deadline", "8"]
        began = time.monotonic()
        found, out, err = alone.run(*words)
        text = " ".join((out + err).split())
        if found != code or not re.search(says, text):
            raise Wrong("wrong verdict" if found == 0 else "not told", f"exit code {found}: {text[-600:]}")
        if "Traceback" in err or "\x1b" in out + err:
            raise Wrong("not told", text[-600:])
        if "minute" in what and time.monotonic() - began > 45:
            raise Wrong("not told", f"{time.monotonic() - began:.0f} s for a deadline of 8 s")
        return next((line.strip() for line in out.splitlines() if re.search(says, line)), text[-200:])

    return act


def _meddler(bench: Bench) -> str:
    case = Case("meddler", f"{STRANGE}:Meddler", "mlp-tiny", 2, micro_batches=2)
    checks = ["memory.at_rest", "traffic.volume", "numerics.gradient"]
    records = {
        id: bench.local.launch(run, deadline_s=DEADLINE_S, suite="faults") for id, run in plan([case], checks).items()
    }
    if (after := completes(case, checks, records)).status is not Status.PASS:
        raise Wrong("wrong verdict", after.actual)
    for finding in judge("faults", [case], checks, records, by="claim").findings:
        if finding.status is not Status.PASS:
            raise Wrong("wrong verdict", f"{finding.id}: {finding.status.value}: {finding.actual}")
    return "pass: what is measured is measured by zerobench's own copy"


def _registered(folder: Path, distribution: str, name: str) -> None:
    """A distribution in `folder` that registers an implementation."""
    about = folder / f"{distribution}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    entry = f"{name} = zerobench.implementations.reference:Zero2"
    (about / "entry_points.txt").write_text(f"[zerobench.implementations]\n{entry}\n", encoding="utf-8")


def _twice(bench: Bench) -> str:
    alone = bench.apart("twice")
    for distribution in ("one", "two"):
        _registered(alone.folder / "site", distribution, "mine")
    environ = {"PYTHONPATH": str(alone.folder / "site")}
    code, out, err = alone.run("conform", "mine", *SMALL, env=environ)
    if code != 2 or not re.search("registered twice, by one 1.0 .* and two 1.0", " ".join(err.split())):
        raise Wrong("not told", f"exit code {code}: {(out + err)[-600:]}")
    for name in ("one.py", "two.py"):
        (alone.folder / name).write_text(PLUGIN.format(before="", body="pass"))
    code, out, again = alone.run("run", "short.yaml", "-i", "one.py:Mine", "-i", "two.py:Mine")
    if code != 2 or "would both be called 'mine' in ids" not in again:
        raise Wrong("wrong verdict", f"exit code {code}: {(out + again)[-600:]}")
    return f"{err.strip().splitlines()[0]}; {again.strip().splitlines()[0]}"


def _names(bench: Bench) -> str:
    alone = bench.apart("names")
    for i, name in enumerate(HOSTILE_NAMES):
        _registered(alone.folder / "site", f"stranger{i}", " ".join(name.split("\n")))
    environ = {"PYTHONPATH": str(alone.folder / "site")}
    code, out, err = alone.run("list", "implementations", env=environ)
    if code or "\x1b" in out or "\u202e" in out or "zero2" not in out:
        raise Wrong("not told", f"exit code {code}: {(out + err)[-600:]}")
    for name in HOSTILE_NAMES:
        code, out, err = alone.run("conform", name, *SMALL, env=environ)
        if code not in (1, 2) or "Traceback" in err or "\x1b" in out + err or "\u202e" in out + err:
            raise Wrong("not told", f"{name!r}: exit code {code}: {(out + err)[-600:]}")
    outside = [path for path in alone.folder.rglob("*") if path.name in ("passwd", "etc")]
    if outside:
        raise Wrong("file left", str(outside))
    return "refused, or run under a name without them"
