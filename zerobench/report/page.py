"""A stored result as one page for a browser: self-contained, without script, readable on a phone, on paper, in the dark.

The verdict stands first, then what was measured as tables and charts, where it was made, and every finding. Everything
that comes from a record is escaped by the template; charts by `charts`. The page asks for nothing from elsewhere, and its
policy (Content-Security-Policy) would not let it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from zerobench.case import Case
from zerobench.checks.catalogue import CHECKS
from zerobench.finding import Finding, Level, Status, Verdict
from zerobench.record import Provenance, Record
from zerobench.report import charts, figures
from zerobench.report.headline import headline, loud, skips
from zerobench.report.matrix import MEANING, Matrix, row_name, verdicts
from zerobench.report.matrix_html import matrix_table
from zerobench.report.parts import Chart, Group, Section, Shown
from zerobench.report.pen import Drawing, Pen
from zerobench.report.terminal import case_rows
from zerobench.report.text import clean
from zerobench.terms import MODEL_STATES, Collective
from zerobench.units import count_text, nbytes_text, seconds_text, significant_text

LOUD_SHOWN = 300
"""Findings that are written out in full; the rest of a very bad run are counted."""
QUIET_NBYTES = 600_000
"""What the findings that passed may take of the page, so that it stays something that can be mailed."""
ROWS = 600
"""Rows of a table at most. Of the cases those that are not well come first where there are more."""
CHARTS = 12
"""Charts of one section at most."""


def html(
    about: Provenance,
    cases: Sequence[Case],
    records: Mapping[str, Record],
    launches: Mapping[str, Sequence[Record]],
    verdict: Verdict,
    *,
    judged_by: str,
    source: str,
    pen: Pen | None = None,
) -> str:
    """The whole page. source: the results file, as it was given. pen: what draws, here if not given. Raises
    charts.NoMatplotlib."""
    pen = pen or Pen()
    matrix = Matrix()
    matrix.add(about, cases, verdict.findings)
    noisy = loud(verdict.findings)
    anchors: dict[tuple[str, str], str] = {}
    full = []
    for i, finding in enumerate(noisy[:LOUD_SHOWN]):
        anchors.setdefault((_implementation(matrix, finding), finding.check), f"finding-{i}")
        full.append(_shown(matrix, finding, f"finding-{i}"))
    known = [_shown(matrix, f) for f in verdict.findings if f.status is Status.XFAIL]
    groups = _groups(matrix, verdict.findings)
    quiet = {group.check: f"check-{group.check}" for group in groups}
    rows = case_rows(cases, records, verdict)
    head = headline(verdict, cases)
    runs = figures.plain_runs(cases, records)
    states, traffic = _states(pen, figures.states(runs)), _traffic(pen, figures.traffic(runs))
    timelines = _timelines(pen, figures.timelines(runs))
    times = _times(pen, figures.step_times(runs, launches), verdict)  # last, while the others are drawn
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            head=head,
            about=about,
            cases=cases,
            source=source,
            judged_by=judged_by,
            case_head=rows[0],
            case_rows=_first(rows[1:]),
            cases_left_out=max(len(rows) - 1 - ROWS, 0),
            numeric=("model states a rank", "sent a step", "step"),
            first_wrong=full[:5],
            matrix=Markup(
                matrix_table(matrix, lambda name, check: anchors.get((name, check)) or quiet.get(check, "quiet"))
            ),
            meaning=[(colour.name, colour.value, meaning) for colour, meaning in MEANING.items()],
            sections=[states, traffic, times, timelines],
            provenance=_provenance(about, records),
            full=full,
            more=len(noisy) - len(full),
            known=known,
            groups=groups,
            skips=skips(verdict.findings),
            counts=dict(head.counts),
        )
    )


def _first(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """At most ROWS of the rows of cases, whose last cell is the case in a word; all of them in their order if they fit."""
    if len(rows) <= ROWS:
        return list(rows)
    return sorted(rows, key=lambda row: row[-1] in ("pass", "skip"))[:ROWS]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["brief"] = charts.label
    return environment


# -- charts ------------------------------------------------------------------------------------------------------------


def _small(pen: Pen, draw: Callable[..., None], **how: Any) -> Drawing:
    return pen.svg(draw, size=(3.9, 2.7), frame=charts.FRAME, **how)


def _states(pen: Pen, found: Sequence[figures.States]) -> Section:
    made = []
    top = 1.12 * max(
        (sum(b.values()) / f.psi for f in found for bars in (f.measured, f.formula) for b in bars.values()), default=1
    )
    for i, one in enumerate(found[:CHARTS]):
        title = f"{one.implementation}, {one.precision}"
        head = ("n", *(f"{c.value}" for c in MODEL_STATES), "together", "formula")
        rows, said = [], []
        for n, held in one.measured.items():
            due = sum(one.formula[n].values())
            total = sum(held.values())
            each = [nbytes_text(round(held[c])) for c in MODEL_STATES]
            rows.append(
                (str(n), *each, f"{_bytes(total)} ({_psi(total, one.psi)})", f"{_bytes(due)} ({_psi(due, one.psi)})")
            )
            said.append(f"n = {n}: {_psi(total, one.psi)}, formula {_psi(due, one.psi)}")
        about = f"Bytes of model states that a rank of {one.implementation} holds, divided by Psi. {'; '.join(said)}."
        svg = _small(pen, partial(charts.draw_states, figure=one, top=top), key=f"states{i}", title=title, about=about)
        note = f"{one.model}, Psi = {count_text(one.psi)}"
        made.append(Chart(title, note, svg, head, tuple(rows)))
    return Section(
        "memory",
        "Memory",
        "Model states of a rank before the optimizer steps, beside the ZeRO paper's formula for the claimed stage and "
        "dtypes. A chart for an implementation and precision: the model with the most world sizes.",
        tuple(made),
        "no run of this result counted bytes",
        (("parameters", "c1"), ("gradients", "c2"), ("optimizer states", "c3")),
        _left_out(len(found) - len(made), "implementations"),
    )


def _traffic(pen: Pen, found: Sequence[figures.Traffic]) -> Section:
    made = []
    for i, one in enumerate(found[:CHARTS]):
        kinds = [k for k in Collective if any(k in sent for sent in one.sent.values())]
        title = f"{one.model}, n = {one.n}, {one.precision}"
        rows, said = [], []
        for name, sent in one.sent.items():
            total = sum(sent.values())
            each = [f"{sent.get(k, 0.0):.2f} Psi" for k in kinds]
            elements = count_text(one.elements(total))
            rows.append((name, *each, f"{total:.2f} Psi", elements, f"{one.claimed[name]:.2f} Psi"))
            said.append(f"{name}: {total:.2f} Psi, claimed {one.claimed[name]:.2f} Psi")
        about = f"Elements that a rank sends in a step, in Psi (n-1)/n. {'; '.join(said)}."
        size = (4.5, 0.9 + 0.32 * len(one.sent))
        frame = charts.beside(charts.traffic_names(one))
        svg = pen.svg(
            partial(charts.draw_traffic, figure=one),
            key=f"traffic{i}",
            title=title,
            about=about,
            size=size,
            frame=frame,
        )
        head = ("implementation", *(k.value for k in kinds), "together", "elements", "claimed")
        made.append(Chart(title, f"Psi = {count_text(one.psi)}", svg, head, tuple(rows)))
    return Section(
        "traffic",
        "Traffic",
        "Elements that a rank sends in a step on a ring, by kind of collective; a tick marks what the implementation "
        "claims, the dashed line the 2 Psi of DDP and of stages 1 and 2. A chart for a precision: the largest world size.",
        tuple(made),
        "no run of this result had more than one rank and completed",
        (
            ("all-reduce", "c1"),
            ("reduce-scatter", "c2"),
            ("all-gather", "c3"),
            ("other kinds, and the claim's tick", "c4"),
        ),
        _left_out(len(found) - len(made), "precisions"),
    )


def _times(pen: Pen, found: Sequence[figures.StepTime], verdict: Verdict) -> Section:
    groups: dict[tuple[str, str], list[figures.StepTime]] = {}
    for row in found:
        groups.setdefault((row.case.model, row.case.precision), []).append(row)
    derived = {f.case: dict(f.metrics) for f in verdict.findings if f.check == "time.step"}
    made = []
    for i, ((model, precision), rows) in enumerate(list(groups.items())[:CHARTS]):
        title = f"{model}, {precision}"
        shown = rows[:24]
        said = "; ".join(f"{r.case.implementation} n = {r.case.world_size}: {seconds_text(r.median_s)}" for r in shown)
        size = (4.5, 0.8 + 0.21 * len(shown))
        about, frame = f"Median step times. {said}.", charts.beside(charts.time_names(shown))
        svg = pen.svg(
            partial(charts.draw_times, rows=shown), key=f"time{i}", title=title, about=about, size=size, frame=frame
        )
        head = ("case", "median", "95 % interval", "of", "tokens/s", "bus bandwidth at least", "MFU")
        table = tuple(_time_row(row, derived.get(row.case.id, {})) for row in rows[:ROWS])
        note = f"the first {len(shown)} of {len(rows)} cases" if len(shown) < len(rows) else ""
        made.append(Chart(title, note, svg, head, table))
    return Section(
        "time",
        "Step time",
        "Bare steps, nothing watching: the slowest rank of each, the median, and the interval that covers it in 95 % of "
        "repetitions. A shared machine's clock says little; zerobench ab compares. Bus bandwidth is that of the whole "
        "step with nccl-tests' factors, so a lower bound of what links carried.",
        tuple(made),
        "no run of this result timed bare steps",
        (("median", "c2"), ("interval", "c1")),
        _left_out(len(groups) - len(made), "models"),
    )


def _time_row(row: figures.StepTime, derived: Mapping[str, float]) -> tuple[str, ...]:
    bus = sum(v for k, v in derived.items() if k.startswith("bus_"))
    interval = (
        f"{seconds_text(row.low_s)} to {seconds_text(row.high_s)}"
        if row.low_s is not None and row.high_s is not None
        else "too few"
    )
    return (
        row.case.id,
        seconds_text(row.median_s),
        interval,
        row.of,
        count_text(round(row.tokens_per_s)),
        f"{nbytes_text(round(bus))}/s" if bus else "–",
        f"{derived['mfu']:.1%}" if "mfu" in derived else "no peak known",
    )


def _timelines(pen: Pen, found: Sequence[figures.Timeline]) -> Section:
    made = []
    held = [max([*(p.live for p in f.points), *f.peaks.values()], default=0) / f.psi for f in found if f.psi]
    top = 1.06 * max(held, default=1)
    for i, one in enumerate(found[:CHARTS]):
        title = f"{one.case.implementation}, {one.case.precision}"
        rows = [
            (
                f"{p.phase}: {p.place}",
                _bytes(p.live),
                _psi(p.live, one.psi),
                _bytes(p.bare) if p.bare is not None else "–",
            )
            for p in one.points
        ]
        rows += [(f"{phase}: peak", _bytes(peak), _psi(peak, one.psi), "–") for phase, peak in one.peaks.items()]
        most = max((p.live for p in one.points), default=0)
        peaks = ", ".join(f"{_psi(v, one.psi)} within {k}" for k, v in one.peaks.items())
        about = f"Live bytes on rank {one.rank} at {len(one.points)} places of a step: at most {_psi(most, one.psi)}; {peaks}."
        svg = _small(pen, partial(charts.draw_timeline, figure=one, top=top), key=f"line{i}", title=title, about=about)
        note = f"{one.case.model}, n = {one.case.world_size}, rank {one.rank}"
        head = ("place", "live", "in Psi", "bare model")
        made.append(Chart(title, note, svg, head, tuple(rows)))
    return Section(
        "step",
        "Memory through a step",
        "Live bytes of the fullest rank at every boundary between two units, forward and then backward, beside what the "
        "same model's activations hold when it runs bare. A chart for an implementation and precision: the case with "
        "the most units and ranks.",
        tuple(made),
        "no run of this result watched the boundaries between units",
        (("live bytes", "c3"), ("highest within a phase", "c4"), ("dotted: the bare model's activations", "ink")),
        _left_out(len(found) - len(made), "implementations"),
    )


def _left_out(count: int, what: str) -> str:
    return f"{count} more {what} are left out here; the table of cases has them." if count > 0 else ""


# -- findings ----------------------------------------------------------------------------------------------------------


def _implementation(matrix: Matrix, finding: Finding) -> str:
    cases = matrix.cases.get(finding.case)
    return row_name(cases[0]) if cases else ""


def _shown(matrix: Matrix, finding: Finding, anchor: str = "") -> Shown:
    command = matrix.command(finding) if finding.case in matrix.cases else ""
    said = verdicts(finding) if finding.claim is not finding.paper else ""
    return Shown(finding, command, said, anchor)


def _groups(matrix: Matrix, findings: Iterable[Finding]) -> list[Group]:
    groups: dict[str, Group] = {}
    room = QUIET_NBYTES
    passed = [f for f in findings if f.status is Status.PASS]
    for finding in sorted(passed, key=lambda f: list(CHECKS).index(f.check) if f.check in CHECKS else len(CHECKS)):
        level = "" if finding.level is Level.MUST else finding.level.value
        group = groups.setdefault(finding.check, Group(finding.check, finding.requirement, level))
        shown = _shown(matrix, finding)
        room -= 180 + sum(len(t.encode()) for t in (finding.case, finding.expected, finding.actual, shown.command))
        room -= sum(len(line.encode()) for line in finding.detail)
        if room > 0:
            group.shown.append(shown)
        else:
            group.left_out += 1
    return list(groups.values())


def _provenance(about: Provenance, records: Mapping[str, Record]) -> list[tuple[str, str]]:
    commit = f"{about.commit[:12]}{', with uncommitted changes' if about.dirty else ''}" if about.commit else ""
    ran = sum(r.wall_s for r in records.values())
    rows = [
        ("suite", about.suite),
        ("started", about.started),
        ("zerobench", about.zerobench + (f" at {commit}" if commit else "")),
        ("Python", about.python),
        ("torch", about.torch),
        ("libraries", ", ".join(sorted({name for record in records.values() for name in record.libraries}))),
        ("backend", about.backend),
        ("device", f"{about.device_count} x {about.device}" if about.device_count else about.device),
        ("interconnect", about.interconnect),
        ("driver", about.driver),
        ("processor", f"{about.cpu} ({about.cores} cores)" if about.cpu else f"{about.cores} cores"),
        ("kernel", about.kernel),
        ("host", about.host),
        ("runs", f"{len(records)}, {seconds_text(round(ran, 1))} together"),
        ("suite digest", about.suite_digest),
    ]
    rows += [(name, value) for name, value in sorted(about.environment.items())]
    return [(name, value) for name, value in rows if value]


def _bytes(nbytes: float) -> str:
    return nbytes_text(round(nbytes))


def _psi(nbytes: float, psi: int) -> str:
    return f"{significant_text(Fraction(round(nbytes), psi))} Psi" if psi else "–"
