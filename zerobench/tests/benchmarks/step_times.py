"""Step times and bytes of many implementations beside torch's DDP, launches interleaved.

    python -m zerobench.tests.benchmarks.step_times [--model mlp-8m] [--rounds 6] [--python megatron=PYTHON] [IMPLEMENTATION ...]

Libraries that cannot share an environment take part by `--python`, once for each: what begins so is launched by that
interpreter, which has this zerobench and the same torch.

`zerobench ab` compares two. Here a round is one launch of each implementation, those of a round next to each other in
time, and every round begins with another; a launch gives one number, the median over its bare steps of the slowest
rank's seconds. The ratio to torch-ddp is taken within a round, where both met the same machine. Printed: the median
ratio over rounds, and the least and the greatest, which enclose the true median with 1 - 2^(1 - rounds), 97 % for 6.

Bytes are those of one more launch that watches memory: what is claimed at the end of backward, in Psi, and the highest
point that the ledger saw of the last step beyond what was alive before the engine was built.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from zerobench.case import Case
from zerobench.checks.timing import slowest
from zerobench.implementations.registry import names
from zerobench.launch.elsewhere import Elsewhere
from zerobench.launch.local import Local
from zerobench.provenance import collect
from zerobench.record import Record
from zerobench.report.text import table
from zerobench.stats import median
from zerobench.store import Writer
from zerobench.terms import MODEL_STATES, Moment

BASE = "torch-ddp"


def seconds(record: Record) -> float:
    """Of one launch: the median over steps of the slowest rank's."""
    return median(slowest([sample.times_s for sample in record.samples]))


def held_psi(record: Record) -> tuple[float, float]:
    """(claimed, live) bytes of the fullest rank at BACKWARD of the last step, as multiples of Psi."""
    assert record.model is not None
    last = record.run.case.warmup + record.run.case.measured - 1
    held = [h for s in record.samples for h in s.holdings if h.step == last and h.moment is Moment.BACKWARD]
    claimed = max(sum(h.claimed.get(c.value, 0) for c in MODEL_STATES) for h in held)
    return claimed / record.model.psi, max(h.live for h in held) / record.model.psi


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("implementation", nargs="*", help="default: all that are registered")
    parser.add_argument("--model", default="mlp-8m")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--python", action="append", default=[], metavar="PREFIX=PYTHON", help="whose interpreter this is"
    )
    parser.add_argument("--results", type=Path, default=Path("results/step-times.jsonl"), help="where records are kept")
    arguments = parser.parse_args()
    asked = arguments.implementation or [entry.name for entry in names()]
    cases = [Case(name, name, arguments.model, 2) for name in dict.fromkeys([BASE, *asked])]
    load = os.getloadavg()[0]
    memory: dict[str, Record] = {}
    timed: dict[str, list[Record]] = {}
    with Writer.fresh(arguments.results) as writer, Local() as local, ExitStack() as stack:
        writer.write(collect(suite="step-times", suite_digest="", cases=tuple(case.to_json() for case in cases)))
        elsewhere = {
            prefix: stack.enter_context(Elsewhere(Path(python), "step-times"))
            for prefix, _, python in (each.partition("=") for each in arguments.python)
        }

        def launch(case: Case, scenario: str) -> Record:
            by = next((there for prefix, there in elsewhere.items() if case.implementation.startswith(prefix)), local)
            record = replace(by.launch(case.run(scenario), deadline_s=300), provenance="")
            writer.write(record)
            return record

        for case in cases:
            memory[case.implementation] = launch(case, "plain")
        cases = [case for case in cases if memory[case.implementation].status == "ok"]
        for turn in range(arguments.rounds):
            first = turn * len(cases) // arguments.rounds
            for case in [*cases[first:], *cases[:first]]:
                timed.setdefault(case.implementation, []).append(launch(case, "timed"))
    print(
        f"{arguments.model}, n = 2, fp32, {arguments.rounds} rounds; load {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    print("\n".join(table(rows(memory, timed))))
    for record in [*memory.values(), *(record for launches in timed.values() for record in launches)]:
        if record.status != "ok":
            print(f"{record.id}: {record.status}: {record.reason}")
    return 0


def rows(memory: dict[str, Record], timed: dict[str, list[Record]]) -> list[list[str]]:
    """A head and a line an implementation; what did not run says why."""
    lines = [["implementation", "claims", "step / DDP", "least to greatest", "step", "claimed", "live"]]
    for name, record in memory.items():
        launches = list(zip(timed.get(name, ()), timed[BASE], strict=False))
        bad = next((r for r in [record, *timed.get(name, ())] if r.status != "ok"), None)
        if bad is not None:
            lines.append([name, bad.status, "", "", "", "", ""])
            continue
        ratios = sorted(seconds(mine) / seconds(base) for mine, base in launches)
        claimed, live = held_psi(record)
        assert record.claims is not None
        step_ms = 1e3 * median([seconds(mine) for mine, _ in launches])
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        bytes_ = [f"{claimed:.2f} Psi", f"{live:.2f} Psi"]
        title = f"{name} (shimmed)" if record.shimmed else name
        lines.append(
            [title, f"stage {int(record.claims.stage)}", f"{median(ratios):.2f}", spread, f"{step_ms:.0f} ms", *bytes_]
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
