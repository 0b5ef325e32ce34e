"""`zerobench explain`: reads a results file, and says why a case holds what it holds. Needs no torch."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from zerobench.commands_info import fail, note, write_lines


def explain(arguments: Namespace) -> int:
    from zerobench.explain import explain as explained
    from zerobench.explain.find import cases_of, find_case
    from zerobench.report.explain import explain_lines
    from zerobench.report.explain_chart import NoPlot, draw
    from zerobench.report.text import colourful
    from zerobench.store import StoreError, read

    try:
        results = read(Path(arguments.result))
        case = find_case(arguments.case, cases_of(results.provenances.values()))
    except (StoreError, ValueError) as error:
        return fail(str(error))
    for problem in results.problems:
        note(problem)
    try:
        waterfalls = explained(case, results.records)
    except ValueError as error:
        return fail(str(error), 6)
    print("\n".join(explain_lines(waterfalls, colourful(sys.stdout))))
    try:
        if arguments.json:
            write_lines(arguments.json, [json.dumps(w.to_json()) for w in waterfalls])
        if arguments.chart:
            draw(waterfalls, Path(arguments.chart))
    except NoPlot as error:
        return fail(str(error), 3)
    except ValueError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: cannot be written: {error.strerror}; name another file", 3)
    return 0
