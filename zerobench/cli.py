"""The command line. Thin: it reads words, calls what does the work, prints, and returns the exit code of the verdict."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zerobench import __version__, interrupt

EXIT_CODES = """exit codes:
  0 all as required    1 a finding failed, or a regression    2 usage or bad YAML    3 infrastructure
  4 baseline missing   5 nothing selected    6 inconclusive or invalid measurement    130 interrupted
  129 ended by SIGHUP  143 ended by SIGTERM"""


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest spelling of a mistyped command."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="zerobench",
        description="Does a ZeRO implementation keep its promises? Runs real training steps on real ranks, records memory,\n"
        "collectives and numerics, and judges them against the published formulas.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"zerobench {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = _command(commands, "run", "run suites and judge what comes of them")
    run.add_argument("suite", nargs="+", help="a shipped suite by name, or a YAML file")
    run.add_argument(
        "-i", "--implementation", action="append", metavar="IMPL", help="instead of the suite's; may repeat"
    )
    run.add_argument("-k", "--select", metavar="ID", help="only cases and findings whose id has this part")
    run.add_argument("--world-size", type=_sizes, metavar="N,...", help="instead of the suite's")
    _resumable(run)
    run.add_argument(
        "--launches", type=_launches, default=1, metavar="K", help="launch each timed run K times (default 1)"
    )
    run.add_argument("--dry-run", action="store_true", help="print the cases and runs, and do nothing")
    _traced(run)
    _shared(run)

    conform = _command(commands, "conform", "judge one implementation by every check that applies")
    conform.add_argument("implementation", help="an entry point, package.module:Class, or path.py:Class")
    conform.add_argument("--world-size", type=_sizes, default=(2, 3), metavar="N,...", help="default 2,3")
    conform.add_argument("--model", type=_words, default=("gpt-tiny",), metavar="MODEL,...", help="default gpt-tiny")
    conform.add_argument(
        "--precision", type=_words, default=("fp32", "bf16"), metavar="P,...", help="default fp32,bf16"
    )
    conform.add_argument("--check", action="append", metavar="ID", help="only this check; may repeat")
    conform.add_argument(
        "--option", action="append", default=[], metavar="K=V", help="an option for the implementation"
    )
    conform.add_argument(
        "--xfails", metavar="FILE", help="known deviations: a YAML list of {check, reason, ...}, as a suite's xfail"
    )
    conform.add_argument(
        "--judge", choices=("claim", "paper"), default="claim", help="which verdict counts (default claim)"
    )
    _resumable(conform)
    _traced(conform)
    _shared(conform)

    report = _command(commands, "report", "judge stored results again and print them; needs no torch")
    report.add_argument("result", help="a results file (.jsonl)")
    report.add_argument("--judge", choices=("claim", "paper"), help="which verdict counts (default: as it was run)")
    report.add_argument("--strict", action="store_true", help="SHOULD counts as MUST")
    report.add_argument("--json", metavar="FILE", help="write a line a finding")
    report.add_argument("-o", "--html", metavar="FILE", help="write one page for a browser; needs zerobench[report]")
    report.add_argument("--markdown", metavar="FILE", help="write Markdown")

    matrix = _command(commands, "matrix", "the conformance matrix of stored results, implementation by check")
    matrix.add_argument("result", nargs="+", help="results files (.jsonl); of one case and check the last counts")
    matrix.add_argument("-o", "--output", metavar="FILE.md", help="write Markdown there instead of printing it")
    matrix.add_argument("--html", metavar="FILE", help="write a page with every finding")
    matrix.add_argument("--json", metavar="FILE", help="write a line a finding, behind the versions it was made with")

    accept = _command(commands, "accept", "make a result the baseline that later ones are compared with")
    accept.add_argument("result", help="a results file (.jsonl)")
    accept.add_argument("--baselines", default="baselines", metavar="DIR", help="where to write (default baselines/)")
    accept.add_argument("--bytes", action="store_true", help="exact numbers only: no step times")
    accept.add_argument("--drop", action="store_true", help="cases that the result lacks leave the baseline")

    compare = _command(commands, "compare", "compare a result with a baseline; needs no torch")
    compare.add_argument("result", help="a results file (.jsonl)")
    compare.add_argument("baseline", nargs="?", default="baselines", help="a folder or a file (default baselines/)")
    compare.add_argument("-k", "--select", metavar="ID", help="only findings whose id has this part")
    compare.add_argument("--bytes", action="store_true", help="exact numbers only: no step times")
    compare.add_argument("--json", metavar="FILE", help="write a line a finding")

    history = _command(
        commands, "history", "many results, oldest first: where step times, bytes or collectives shifted"
    )
    history.add_argument(
        "result", nargs="*", default=["results"], help="results files and folders of them (default results/)"
    )
    history.add_argument("--suite", metavar="NAME", help="only results of this suite")
    history.add_argument("-k", "--select", metavar="ID", help="only findings whose id has this part")
    history.add_argument("--since", metavar="DATE", help="the first level begins here, as 2026-11-29 (UTC)")
    history.add_argument(
        "--floor", type=_share, default=0.03, metavar="X", help="a slowdown up to this share is a trifle (default 0.03)"
    )
    history.add_argument("--json", metavar="FILE", help="write a line a finding")

    ab = _command(commands, "ab", "compare the step times of two implementations, launched in turns")
    ab.add_argument("--base", required=True, metavar="IMPL", help="an entry point, module:Class or path.py:Class")
    ab.add_argument("--head", required=True, metavar="IMPL", help="what is compared with it; may be the same")
    ab.add_argument("--base-python", metavar="PATH", help="the interpreter of another environment for base")
    ab.add_argument("--head-python", metavar="PATH", help="and for head")
    ab.add_argument("--model", type=_words, default=("mlp-8m", "gpt-8m"), metavar="M,...", help="default mlp-8m,gpt-8m")
    ab.add_argument("--world-size", type=_sizes, default=(2,), metavar="N,...", help="default 2")
    ab.add_argument("--precision", type=_words, default=("fp32",), metavar="P,...", help="default fp32")
    ab.add_argument("--optimizer-free", action="store_true", help="plain SGD instead of AdamW: next to no optimizer")
    ab.add_argument(
        "--rounds", type=_rounds, default=14, metavar="K", help="pairs a cell before confirmation: 5 to 14 (default 14)"
    )
    _shared(ab)

    serve = _command(commands, "serve", "launch what standard input orders; `ab` uses it for another environment")
    serve.add_argument("suite", help="what the records say they belong to")

    listing = _command(commands, "list", "what there is")
    listing.add_argument("what", choices=("suites", "implementations", "models", "checks", "mutants"))

    validate = _command(commands, "validate", "read a suite strictly and say all that is wrong with it")
    validate.add_argument("suite", nargs="+")

    predict = _command(commands, "predict", "what ZeRO costs on paper: bytes and traffic by stage")
    predict.add_argument("--params", required=True, metavar="PSI", help="parameters: 7.5e9, 7.5B")
    predict.add_argument("--world-size", type=int, required=True, metavar="N")
    predict.add_argument(
        "--recipe",
        default="paper",
        help="paper, fp32, megatron, megatron-fp16, deepspeed, deepspeed-docs or fsdp (default paper)",
    )
    predict.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="K=V",
        help="change the recipe: parameter, gradient, master, moments, reduce or gather, as gradient=fp32 or master=none; "
        "may repeat",
    )
    predict.add_argument("--optimizer", choices=("adam", "momentum", "sgd"), default="adam", help="default adam")
    predict.add_argument("--micro-batches", type=int, default=1, metavar="A")
    predict.add_argument("--shard-size", type=int, metavar="S", help="hybrid: ranks in a shard group; n/S replicas")
    predict.add_argument("--gathered", action="store_true", help="stage 3 keeps weights gathered until backward")
    predict.add_argument(
        "--reduce-once", action="store_true", help="stages 2 and 3 reduce after the last micro-batch only"
    )
    predict.add_argument(
        "--unit", metavar="NUMEL", help="elements of the largest unit: adds what stage 3 gathers of it"
    )
    predict.add_argument(
        "--card", metavar="BYTES", help="a card's memory, as 80GB: adds the largest model and smallest n"
    )
    predict.add_argument(
        "--bandwidth", metavar="BYTES/s", help="of a rank, each way, as 100GB/s: adds a lower bound of the step's time"
    )
    predict.add_argument("--json", metavar="FILE", help="write a line a stage")

    explain = _command(commands, "explain", "why a case holds what it holds, from the formula down; needs no torch")
    explain.add_argument("result", help="a results file (.jsonl)")
    explain.add_argument("case", help="a case's id, or a part of it that no other case has")
    explain.add_argument("--json", metavar="FILE", help="write a line a waterfall")
    explain.add_argument("--chart", metavar="FILE", help="draw them, as .svg or .png; needs zerobench[report]")

    doctor = _command(commands, "doctor", "say what this machine can measure and what it cannot, and why")
    doctor.add_argument("--require", choices=("gpu",), help="one line and exit code 3 where there is none")

    _command(commands, "schema", "print the JSON Schema of suites, for editors")
    _command(commands, "spec", "print the specification: every check with its requirement, formula and mutants")
    selftest = _command(commands, "selftest", "run every mutant and say which checks kill it; no correct one may fail")
    selftest.add_argument("-k", "--select", action="append", metavar="NAME", help="only trials with this in their name")
    selftest.add_argument("--markdown", metavar="FILE", help="write the kill matrix as Markdown")
    selftest.add_argument("--quick", action="store_true", help="few correct implementations, at n = 2 in bf16 only")
    selftest.add_argument(
        "--results", default="results", metavar="DIR", help="where records are written (default results/)"
    )
    selftest.add_argument("--resume", metavar="RESULT", help="go on with an interrupted self-test of the same commit")
    return top


def _command(commands: argparse._SubParsersAction[_Parser], name: str, about: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")


def _shared(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--results", default="results", metavar="DIR", help="where results are written (default results/)"
    )
    command.add_argument("--json", metavar="FILE", help="write a line a finding")
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "shared-gpu"),
        default="auto",
        help="auto: as the suite says; for conform, CUDA if each rank can have a GPU. shared-gpu: ranks may share one",
    )
    command.add_argument("--deadline", type=float, metavar="S", help="seconds that one run may take (default 60)")
    command.add_argument("--strict", action="store_true", help="SHOULD counts as MUST")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress")


def _traced(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trace",
        action="store_true",
        help="launch each plain run once more and write one step of it for ui.perfetto.dev, beside the results",
    )


def _resumable(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--resume", metavar="RESULT", help="go on with a results file: runs that it has are not done again"
    )


def _launches(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:6]) <= 1000:
        raise argparse.ArgumentTypeError(f"from 1 to 1000, not {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"a share from 0 to 1, such as 0.03, not {text!r}")
    return share


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 5 <= int(text[:6]) <= 14:
        raise argparse.ArgumentTypeError(f"from 5 to 14, not {text!r}")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"world sizes such as 2,3,4, not {text!r}") from None
    if any(not 1 <= n <= 4096 for n in sizes):
        raise argparse.ArgumentTypeError(f"world sizes from 1 to 4096, not {text!r}")
    return sizes


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; never raises for what a user did."""
    arguments = parser().parse_args(argv)
    try:
        with interrupt.listening():
            from zerobench import commands

            code = commands.COMMANDS[arguments.command](arguments)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt as stop:
        code = interrupt.exit_code(stop)
        print(f"stopped by {interrupt.name(code)}", file=sys.stderr)
        return code
    except BrokenPipeError:  # `zerobench ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
