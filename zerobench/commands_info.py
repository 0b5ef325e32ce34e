"""The commands that tell what there is and what is known on paper; they launch nothing. And what all commands share."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerobench.coherence import Known


def fail(text: str, code: int = 2) -> int:
    from zerobench.report.text import below

    print(f"zerobench: {below(text, 2)}", file=sys.stderr)
    return code


def note(text: str) -> None:
    """A word on standard error that changes no exit code."""
    from zerobench.report.text import on_line

    print(f"note: {on_line(text)}", file=sys.stderr)


def refuse(error: Exception) -> int:
    """Exit code 2, for a file of which every line of the error says what is wrong and where."""
    from zerobench.report.text import clean

    print(clean(str(error)), file=sys.stderr)
    return 2


def known() -> Known:
    """The names that exist here, without importing an implementation."""
    from zerobench.checks.catalogue import CHECKS
    from zerobench.coherence import Known
    from zerobench.implementations.registry import names
    from zerobench.models.sizes import SIZES

    return Known(implementations=tuple(e.name for e in names()), models=tuple(SIZES), checks=tuple(CHECKS))


def write_lines(path: str, lines: Sequence[str]) -> None:
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(line + "\n" for line in lines)


def list_(arguments: Namespace) -> int:
    from zerobench.report.text import clean, table

    rows: list[Sequence[str]] = []
    if arguments.what == "suites":
        from zerobench.suite import find, load, names

        rows = [("suite", "cases", "about")]
        for name in names():
            suite = load(find(name))
            rows.append((name, str(len(suite.cases())), suite.about))
    elif arguments.what == "implementations":
        from zerobench.implementations.registry import names as entries

        rows = [("name", "where", "distribution")]
        rows += [(e.name, e.value, e.distribution) for e in entries()]
    elif arguments.what == "models":
        from zerobench.models.sizes import SIZES

        rows = [("model", "family", "sizes")]
        rows += [(name, family, ", ".join(f"{k} {v}" for k, v in s.items())) for name, (family, s) in SIZES.items()]
    elif arguments.what == "checks":
        from zerobench.checks.catalogue import CHECKS

        rows = [("check", "level", "claim", "requirement")]
        rows += [(c.id, c.level.value, c.kind or "-", c.requirement) for c in CHECKS.values()]
    else:
        from zerobench.mutants.names import MUTANTS

        rows = [("mutant", "killed by", "fault")]
        rows += [(m.name, ", ".join(m.killers), m.fault) for m in MUTANTS.values()]
    print("\n".join(clean(line) for line in table(rows)))
    return 0


def validate(arguments: Namespace) -> int:
    from zerobench.loader import BadFile
    from zerobench.suite import find, load

    code = 0
    for name in arguments.suite:
        try:
            suite = load(find(name), known())
        except BadFile as error:
            code = refuse(error)
        except (LookupError, OSError) as error:
            code = fail(str(error.args[0] if isinstance(error, LookupError) else error))
        else:
            print(f"{suite.path}: {len(suite.cases())} cases, {len(suite.checks)} checks")
    return code


def predict(arguments: Namespace) -> int:
    from zerobench.predict import rows
    from zerobench.recipes import named
    from zerobench.report.predict import Question, json_lines, predict_lines
    from zerobench.units import parse_bandwidth, parse_count, parse_nbytes

    moments = {"adam": 2, "momentum": 1, "sgd": 0}[arguments.optimizer]
    try:
        dtypes = dict(_dtype(word) for word in arguments.dtype)
        question = Question(
            psi=parse_count(arguments.params),
            n=arguments.world_size,
            preset=named(arguments.recipe).with_dtypes(dtypes),
            micro_batches=arguments.micro_batches,
            optimizer=arguments.optimizer,
            shard_size=arguments.shard_size,
            bandwidth=parse_bandwidth(arguments.bandwidth) if arguments.bandwidth else None,
            dtypes=dtypes,
        )
        found = rows(
            question.psi,
            question.n,
            question.preset,
            micro_batches=question.micro_batches,
            moments=moments,
            card_nbytes=parse_nbytes(arguments.card) if arguments.card else None,
            gathered=arguments.gathered,
            reduce_each=not arguments.reduce_once,
            shard_size=question.shard_size,
            unit_numel=parse_count(arguments.unit) if arguments.unit else None,
            bandwidth=question.bandwidth,
        )
    except ValueError as error:
        return fail(str(error))
    print("\n".join(predict_lines(found, question)))
    if arguments.json:
        try:
            write_lines(arguments.json, [json.dumps(line) for line in json_lines(found, question)])
        except OSError as error:
            return fail(f"--json {arguments.json}: cannot be written: {error.strerror}; name another file", 3)
    return 0


def _dtype(word: str) -> tuple[str, str | None]:
    """A field of a recipe and its dtype, from "gradient=fp32"; "none" is none of its own."""
    name, found, dtype = word.partition("=")
    if not found:
        raise ValueError(f"--dtype {word!r}: write it as gradient=fp32")
    return name, None if dtype == "none" else dtype


def doctor(arguments: Namespace) -> int:
    from zerobench.doctor import examine, gpu_obstacle
    from zerobench.report.text import clean, table

    if arguments.require == "gpu" and (obstacle := gpu_obstacle()):
        return fail(f"a GPU is required, and {obstacle}", 3)
    print("\n".join(clean(line) for line in table([("what", "here", "why, or which"), *examine()])))
    return 0


def schema(arguments: Namespace) -> int:
    from zerobench.suite import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def spec(arguments: Namespace) -> int:
    from zerobench.report.spec import spec_lines

    print("\n".join(spec_lines()))
    return 0
