"""The matrix: each cell has the colour of its two verdicts, and strangers' words stay words."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerobench.case import Case
from zerobench.finding import Finding, Status
from zerobench.record import Provenance
from zerobench.report.matrix import Colour, Matrix, colour_of, json_lines, matrix_of, versions
from zerobench.report.matrix_html import html_page
from zerobench.report.matrix_markdown import code, escape, markdown_lines
from zerobench.store import StoreError, Writer
from zerobench.tests.made import CASE as MADE
from zerobench.tests.made import record

ABOUT = Provenance("p", "0.1", "made", "", "host-of-mine", "2030-01-02T03:04:05", torch="2.13.0", commit="abc")
CASE = Case("one", "one", "gpt-tiny", 2, "bf16")


def finding(case: str = CASE.id, check: str = "traffic.volume", **more: Any) -> Finding:
    right = {"status": Status.PASS, "claim": Status.PASS, "paper": Status.PASS, "expected": "2 Psi", "actual": "2 Psi"}
    return Finding("made", case, check, requirement="r", **(right | more))


FAILS = {"status": Status.FAIL, "claim": Status.FAIL, "paper": Status.FAIL}
OWN = {"status": Status.XFAIL, "paper": Status.FAIL, "actual": "3 Psi", "detail": ("known: 3 Psi",)}
SKIPS = {"status": Status.SKIP, "claim": None, "paper": None, "actual": "unsupported: tied"}


def matrix(*findings: Finding, cases: tuple[Case, ...] = (CASE,)) -> Matrix:
    made = Matrix()
    made.add(ABOUT, cases, findings)
    return made


@pytest.mark.parametrize(
    ("more", "colour"),
    [
        ({}, Colour.GREEN),
        ({"status": Status.XPASS}, Colour.GREEN),
        (OWN, Colour.AMBER),
        (FAILS, Colour.RED),
        (FAILS | {"status": Status.XFAIL}, Colour.RED),
        (SKIPS, Colour.GREY),
        (SKIPS | {"status": Status.INVALID}, Colour.DOUBT),
        (SKIPS | {"status": Status.ERROR}, Colour.DOUBT),
    ],
)
def test_a_finding_has_the_colour_of_its_verdicts(more: dict[str, Any], colour: Colour) -> None:
    assert colour_of(finding(**more)) is colour


def test_a_cell_has_the_colour_of_its_worst_case() -> None:
    other = replace(CASE, world_size=4)
    for more, colour in ((SKIPS, Colour.GREEN), (OWN, Colour.AMBER), (FAILS, Colour.RED)):
        made = matrix(finding(), finding(other.id, **more), cases=(CASE, other))
        assert made.cell("one", "traffic.volume").colour is colour
        if colour is not Colour.GREEN:
            assert [f.case for f in made.cell("one", "traffic.volume").telling()] == [other.id]


def test_of_two_results_the_later_counts() -> None:
    made = matrix(finding(**FAILS))
    made.add(ABOUT, (CASE,), [finding()])
    assert made.cell("one", "traffic.volume").colour is Colour.GREEN


def test_a_command_repeats_a_finding_alone() -> None:
    odd = replace(CASE, reference="./a b.py:One", options={"k": "v"})
    made = matrix(finding(odd.id, **OWN), cases=(odd,))
    words = shlex.split(made.command(finding(odd.id, **OWN)))
    assert words[:5] == ["zerobench", "conform", "./a b.py:One", "--check", "traffic.volume"]
    assert words[5:11] == ["--model", "gpt-tiny", "--world-size", "2", "--precision", "bf16"]
    assert words[11:] == ["--option", "k=v", "--judge", "paper"]
    family = finding(CASE.family, "memory.scaling")
    both = matrix(family, cases=(CASE, replace(CASE, world_size=4)))
    assert "--world-size 2,4" in both.command(family)
    several = replace(CASE, micro_batches=2)  # conform has no A
    made = matrix(finding(several.id), cases=(several,))
    assert made.command(finding(several.id)) == f"zerobench run made -k {several.id}::traffic.volume"


def test_markdown_says_requirement_expected_actual_and_both_verdicts() -> None:
    text = "\n".join(markdown_lines(matrix(finding(**OWN), finding(check="numerics.tied", **SKIPS))))
    assert "| traffic.volume | own |" in text and "| numerics.tied | – |" in text
    for part in (
        "torch 2.13.0",
        "claim pass, paper fail (known)",
        "actual: 3 Psi",
        "known: 3 Psi",
        "unsupported: tied",
    ):
        assert part in text
    assert "host-of-mine" not in text


HOSTILE = "<script>alert(1)</script> | `x` \x1b[2J \" onclick='y'"


def test_what_a_record_says_cannot_break_out() -> None:
    made = matrix(finding(**OWN | {"actual": HOSTILE}))
    page = html_page(made)
    assert "<script" not in page and "\x1b" not in page and "&lt;script&gt;" in page
    text = "\n".join(markdown_lines(made))
    assert "<script" not in text.replace("\\<script", "") and "\x1b" not in text
    assert escape("a|b\nc") == "a\\|b c"
    assert code("a `b` c") == "`` a `b` c ``" and code("a") == "`a`"


def test_every_cell_of_the_page_opens_its_findings() -> None:
    page = html_page(matrix(finding(), finding(check="numerics.tied", **SKIPS)))
    for check in ("traffic.volume", "numerics.tied"):
        assert page.count(f'href="#one:{check}"') == 1 and page.count(f'id="one:{check}"') == 1
    assert "http" not in page.replace("https://", "http://").split("</style>")[0]


def test_as_lines_of_json_every_finding_is_there_once() -> None:
    other = replace(CASE, world_size=4)
    made = matrix(
        finding(**OWN), finding(other.id, **FAILS), finding(check="numerics.tied", **SKIPS), cases=(CASE, other)
    )
    head, *lines = [json.loads(line) for line in json_lines(made)]
    assert head == {"made_with": [versions(ABOUT)], "shimmed": {}}
    seen = [(line["implementation"], line["check"], line["case"], line["colour"], line["actual"]) for line in lines]
    assert seen == [
        ("one", "traffic.volume", CASE.id, "amber", "3 Psi"),
        ("one", "traffic.volume", other.id, "red", "2 Psi"),
        ("one", "numerics.tied", CASE.id, "grey", "unsupported: tied"),
    ]


def test_made_from_results_files(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    with Writer(path) as writer:
        writer.write(replace(ABOUT, cases=(CASE.to_json(),), checks=("traffic.volume",)))
    made = matrix_of([path])
    assert made.cell("one", "traffic.volume").colour is Colour.DOUBT  # never run: not clean
    with pytest.raises(StoreError):
        matrix_of([tmp_path / "absent.jsonl"])


def test_results_of_the_same_case_are_judged_as_one(tmp_path: Path) -> None:
    """A run that failed stays failed when others are repeated or added, until it is done again itself."""
    failed = replace(record("tied"), status="error", reason="rank 0 raised")
    results = (
        (("traffic.volume", "numerics.tied"), (record(), failed)),
        (("traffic.overlap",), (record(), record("flight"))),
        (("numerics.tied",), (record("tied"),)),
    )
    paths, colours = [], []
    for index, (checks, records) in enumerate(results):
        paths.append(tmp_path / f"{index}.jsonl")
        with Writer(paths[-1]) as writer:
            writer.write(replace(ABOUT, id=f"p{index}", cases=(MADE.to_json(),), checks=checks))
            for each in records:
                writer.write(replace(each, provenance=f"p{index}"))
        made = matrix_of(paths)
        colours.append(
            [made.cell("zero2", c).colour for c in ("runtime.completes", "traffic.overlap", "traffic.volume")]
        )
    grey, green, red = Colour.GREY, Colour.GREEN, Colour.RED
    assert colours == [[red, grey, green], [red, green, green], [green, green, green]]
    assert [about.id for about in made.sources] == ["p0", "p1", "p2"]


def test_a_published_stack_names_no_place_of_a_machine() -> None:
    stack = 'File "/home/me/venv/lib/python3.11/site-packages/lib/engine.py", line 3\n  at /srv/x/zerobench/worker.py:9'
    made = matrix(finding(**FAILS, detail=(stack,)))
    (found,) = made.cell("one", "traffic.volume").findings.values()
    assert found.detail == ('File "site-packages/lib/engine.py", line 3\n  at zerobench/worker.py:9',)
