"""The page and the Markdown of a result: what they say, in what order, and that strangers' words stay words."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zerobench.cli import main
from zerobench.finding import Finding, Level, Status, Verdict
from zerobench.judge import judge
from zerobench.record import Record
from zerobench.report import charts, figures
from zerobench.report.headline import headline, loud
from zerobench.report.matrix import Matrix
from zerobench.report.page import ROWS, _first, _groups
from zerobench.report.run_markdown import SUMMARY, append_summary, run_lines, within
from zerobench.store import Writer
from zerobench.terms import Category, Collective
from zerobench.tests.made import CASE, PSI, calls, record
from zerobench.tests.pages import HOSTILE, about, hostile, page, right

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Collects elements and attributes; fails on a page whose elements do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    return reader


def test_the_verdict_comes_first_and_failures_before_what_holds() -> None:
    made, cases, records = right()
    wrong = record(change=lambda s: replace(s, calls=tuple(c for k in range(4) for c in calls(k) * 2)))
    text = page(made, cases, records | {wrong.id: wrong})
    order = [text.index(part) for part in ("<h1>", 'id="cases"', 'id="memory"', 'class="s-fail"', 'id="check-')]
    assert order == sorted(order)
    assert "Not all promises are kept: 1 of 1 case fails traffic.volume" in text
    failed = re.search(r'<article id="finding-0".*?</article>', text, re.DOTALL)
    assert failed is not None
    for part in ("requirement", "expected", "2 Psi x (n-1)/n", "actual", "4.00 Psi", "zerobench conform zero2 --check"):
        assert part in failed[0]


def test_a_page_is_whole_and_asks_for_nothing() -> None:
    made, cases, records = right()
    made = replace(
        made, checks=(*made.checks, "numerics.sync", "traffic.single")
    )  # one does not apply, one was not run
    text = page(made, cases, records)
    found = read(text)
    assert found.tags["svg"] == 4 and found.tags["script"] == 0 and found.tags["img"] == 0
    assert all(v.startswith(("#", "data:,")) for k, v in found.attributes if k in ("href", "src"))
    ids = [v for k, v in found.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for k, v in found.attributes if k == "href" and v.startswith("#")} <= set(ids)
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "")
    assert text == page(made, cases, records)  # the same bytes


def test_hostile_words_make_no_element_no_attribute_and_no_control_character() -> None:
    found, text = read(hostile()), hostile()
    made, cases, records = right()
    usual = read(page(made, cases, records))
    assert set(found.tags) <= set(usual.tags) | {"article", "ul", "li", "em", "small", "br", "pre"}
    assert found.tags["script"] == 0 and found.tags["img"] == 0
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert not [v for k, v in found.attributes if k in ("href", "src") and not v.startswith(("#", "data:,"))]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e]", text)
    assert "&lt;script&gt;" in text and "\\x1b[2J" in text and "\\u202e" in text and "{{ 7 * 7 }}" in text


def test_without_data_a_section_says_why() -> None:
    bare = record(change=lambda s: replace(s, holdings=(), boundaries=(), times_s=(), calls=()))
    made, cases, _ = right()
    text = page(made, cases, {bare.id: bare})
    assert "no run of this result timed bare steps" in text and "no run of this result counted bytes" in text
    assert read(text).tags["svg"] == 1  # only traffic, which is nothing


def test_figures_are_the_records_numbers() -> None:
    """Stage 2 at n = 4: 2 Psi + 14 Psi/4; one reduce-scatter and one all-gather of Psi elements a step."""
    _, cases, records = right()
    runs = figures.plain_runs(cases, records)
    (held,) = figures.states(runs)
    assert held.measured[4] == {
        Category.PARAMETER: 2 * PSI,
        Category.GRADIENT: PSI / 2,
        Category.OPTIMIZER: 3 * PSI,
    }
    assert sum(held.formula[4].values()) == 5.5 * PSI
    (sent,) = figures.traffic(runs)
    assert sent.sent == {"zero2": {Collective.REDUCE_SCATTER: 1.0, Collective.ALL_GATHER: 1.0}}
    assert sent.claimed == {"zero2": 2.0} and sent.elements(2.0) == PSI * 3 // 2
    (line,) = figures.timelines(runs)
    assert [p.place for p in line.points] == ["begins", "block 2", "block 1", "block 0", "begins", "ends"]
    assert line.points[1].bare == 100


def test_several_launches_are_replicated_by_launch() -> None:
    def launch(seconds: float) -> Record:
        return record(change=lambda s: replace(s, times_s=(seconds,) * 7))

    id, runs = record().id, [(CASE, record())]
    (one,) = figures.step_times(runs, {id: [launch(0.01)]})
    assert (one.median_s, one.of) == (0.01, "7 steps of one launch")
    (six,) = figures.step_times(runs, {id: [launch(0.01 * k) for k in (1, 2, 3, 4, 5, 6)]})
    assert six.of == "6 launches" and six.median_s == pytest.approx(0.035)
    assert (six.low_s, six.high_s) == (pytest.approx(0.01), pytest.approx(0.06))
    (two,) = figures.step_times(runs, {id: [launch(0.01), launch(0.03)]})
    assert two.low_s is None and two.median_s == pytest.approx(0.02)


def finding(status: Status, case: str = CASE.id, level: Level = Level.MUST, **more: str) -> Finding:
    return Finding("made", case, "traffic.volume", status, "r", level=level, **more)


@pytest.mark.parametrize(
    ("statuses", "tone", "said"),
    [
        ([(Status.PASS, Level.MUST)], "good", "The case keeps its promises."),
        ([(Status.PASS, Level.MUST), (Status.XFAIL, Level.MUST)], "good", "but for 1 known deviation."),
        ([(Status.PASS, Level.MUST), (Status.FAIL, Level.SHOULD)], "good", "1 recommendation (SHOULD) is not met."),
        ([(Status.FAIL, Level.MUST)], "bad", "1 of 1 case fails traffic.volume"),
        ([(Status.XPASS, Level.MUST)], "bad", "fails"),
        ([(Status.PASS, Level.MUST), (Status.INVALID, Level.MUST)], "doubt", "1 finding could not be judged"),
        ([(Status.ERROR, Level.INFO)], "doubt", "could not be judged"),
        ([(Status.SKIP, Level.MUST)], "doubt", "Nothing was judged"),
    ],
)
def test_the_headline_agrees_with_the_exit_code(statuses: list[tuple[Status, Level]], tone: str, said: str) -> None:
    verdict = Verdict(tuple(finding(status, level=level) for status, level in statuses))
    head = headline(verdict, [CASE])
    assert head.tone == tone and said in head.sentence
    assert (verdict.exit_code() == 0) == (tone == "good") and (verdict.exit_code() == 1) == (tone == "bad")


def test_what_must_be_read_has_failures_first() -> None:
    found = loud([finding(s) for s in (Status.INVALID, Status.ERROR, Status.PASS, Status.FAIL, Status.SKIP)])
    assert [f.status for f in found] == [Status.FAIL, Status.ERROR, Status.INVALID]


def test_a_page_of_many_cases_shows_the_bad_ones() -> None:
    rows = [(f"case{i}", "pass" if i != ROWS + 5 else "fail (1)") for i in range(2 * ROWS)]
    shown = _first(rows)
    assert len(shown) == ROWS and shown[0] == rows[ROWS + 5] and shown[1] == rows[0]
    assert _first(rows[:3]) == rows[:3]


def test_a_page_of_many_findings_stays_small() -> None:
    many = [finding(Status.PASS, f"case{i}", expected="e" * 200, actual="a" * 200) for i in range(5000)]
    (group,) = _groups(Matrix(), many)
    assert 500 < len(group.shown) < 3000 and len(group.shown) + group.left_out == 5000


def test_markdown_has_failures_in_full_and_passes_summed() -> None:
    made, cases, records = right()
    wrong = record(change=lambda s: replace(s, calls=tuple(c for k in range(4) for c in calls(k) * 2)))
    records |= {wrong.id: wrong}
    lines = run_lines(judge("made", cases, made.checks, records), cases, records, made, "made.jsonl")
    text = "\n".join(lines)
    assert lines[0].startswith("## Not all promises are kept")
    assert "### FAIL `made::zero2/gpt-tiny/n4/bf16::traffic.volume`" in text and "- again: `zerobench conform" in text
    assert "memory.at\\_rest" not in text and "memory.at_rest × 1" in text


def test_a_summary_is_cut_with_a_word_on_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {i} " + "x" * 90 for i in range(100)]
    kept = within(lines, 5000, "r.jsonl")
    assert kept[0] == lines[0] and sum(len(k) + 1 for k in kept) <= 5000
    assert f"{100 - (len(kept) - 2)} of 100 lines are left out" in kept[-1] and "`r.jsonl`" in kept[-1]
    assert within(lines, 100_000, "r") == lines
    monkeypatch.setenv(SUMMARY, str(tmp_path / "summary.md"))
    assert append_summary(lambda: ["one"], "r") == "" and append_summary(lambda: ["two"], "r") == ""
    assert (tmp_path / "summary.md").read_text() == "one\ntwo\n"
    monkeypatch.setenv(SUMMARY, str(tmp_path))
    assert "Is a directory" in append_summary(lambda: ["x"], "r")


def test_report_writes_both_and_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _, records = right()
    path = tmp_path / "made.jsonl"
    with Writer(path) as writer:
        for item in (replace(made, checks=("memory.at_rest", "time.step")), *records.values()):
            writer.write(item)
    page_path, text_path = tmp_path / "p.html", tmp_path / "p.md"
    assert main(["report", str(path), "-o", str(page_path), "--markdown", str(text_path)]) == 0
    assert "The case keeps its promises" in page_path.read_text() and "keeps its promises" in text_path.read_text()
    assert os.path.getsize(page_path) < 200_000

    def none(*_: object, **__: object) -> str:
        raise charts.NoMatplotlib("charts need matplotlib: pip install 'zerobench[report]'")

    monkeypatch.setattr(charts, "svg", none)
    assert main(["report", str(path), "-o", str(page_path)]) == 2
    assert "zerobench[report]" in capsys.readouterr().err


def test_hostile_labels_in_a_chart_are_one_line_of_text() -> None:
    made = charts.label(HOSTILE, 10_000)
    assert "\n" not in made and "\x1b" not in made
    assert charts.label("a" * 50, 10) == "a" * 9 + "…"
    assert about(()).cases == ()
