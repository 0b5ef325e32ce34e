"""Suites: from YAML to cases, every mistake at its place, and the suites that are shipped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerobench
from zerobench.coherence import cells, mistakes
from zerobench.loader import BadFile
from zerobench.shape import Precision
from zerobench.suite import (
    Known,
    Suite,
    Xfail,
    find,
    implementation_name,
    json_schema,
    load,
    load_xfails,
    names,
    select_ids,
)
from zerobench.terms import PRECISIONS

GOOD = """\
version: 1
suite: model-states
about: Bytes.
matrix:
  implementation: [ddp, zero2, "./my_zero.py:MyZero"]
  model: [mlp-tiny, gpt-tiny]
  world_size: [1, 2, 16]
  precision: [bf16]
  A: [1, 2]
exclude:
  - {implementation: ddp, A: 2}
checks: [memory.at_rest, traffic.volume]
xfail:
  - {implementation: zero2, world_size: [2, 16], check: traffic.volume, reason: all-reduce}
options:
  my-zero: {bucket_mb: 2, overlap: true}
"""
KNOWN = Known({"ddp", "zero2"}, {"mlp-tiny", "gpt-tiny"}, {"memory.at_rest", "traffic.volume"})


def suite_of(text: str, tmp_path: Path, known: Known | None = KNOWN) -> Suite:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    return load(file, known)


def refused(text: str, tmp_path: Path) -> list[str]:
    with pytest.raises(BadFile) as caught:
        suite_of(text, tmp_path)
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


def test_a_good_suite(tmp_path):
    text = GOOD.replace("  my-zero:", "  ./my_zero.py:MyZero:")
    with pytest.raises(BadFile, match=r"options\..*did you mean|the merge key|mapping values"):
        suite_of(text.replace("MyZero:", "MyZeroo:"), tmp_path)
    for spelled in (GOOD, text):
        suite = suite_of(spelled, tmp_path)
        cases = suite.cases()
        assert len(cases) == 3 * 2 * 3 * 2 - 6
        assert [c.id for c in cases[:4]] == [
            "ddp/mlp-tiny/n1/bf16",
            "ddp/mlp-tiny/n2/bf16",
            "ddp/mlp-tiny/n16/bf16",
            "ddp/gpt-tiny/n1/bf16",
        ]
        assert cases[-1].id == "my-zero/gpt-tiny/n16/bf16/A=2/bucket_mb=2/overlap=True"
        assert cases[-1].reference == "./my_zero.py:MyZero"
        assert len({c.id for c in cases}) == len(cases)
        assert (cases[0].warmup, cases[0].measured) == (1, 3)
        assert len(suite.digest) == 64


def test_defaults_are_the_plain_ones(tmp_path):
    matrix = "{implementation: [ddp], model: [mlp-tiny], world_size: [2], precision: [fp32]}"
    suite = suite_of(f"{{version: 1, suite: s, checks: [memory.at_rest], matrix: {matrix}}}", tmp_path)
    assert (suite.launch, suite.judge, suite.deadline_s, suite.matrix.A) == ("local", "paper", None, (1,))
    assert [c.id for c in suite.cases()] == ["ddp/mlp-tiny/n2/fp32"]


def test_every_mistake_at_once_at_its_place(tmp_path):
    text = """\
version: 2
suite: Model_States
launch: locall
steps: {warmup: -1, measure: 3}
matrix:
  implementation: [ddp, zero22, ddp, "a:Zero2", "b:Zero2"]
  model: mlp-tiny
  world_size: [0, true, 4097, -2, "2", 2.0]
  precision: [bf61, no, 16]
checks: [memory.at_rst, at_rest]
xfial: []
xfail:
  - {implementation: zero, world_size: 7, check: traffic.volume, reason: ""}
  - {check: memory.at_rst, resaon: x}
deadline_s: .nan
options: {ddp: {x: [1], "Bad Key": 1, y: "a/b"}, zoro: {}}
exclude: [{}, 3]
"""
    lines = refused(text, tmp_path)
    expected = [
        "x.yaml:1:1: version: should be less than or equal to 1, not 2",
        "x.yaml:2:1: suite: should be small letters, digits and dashes, as it stands in ids and names of files, not",
        "x.yaml:3:1: launch: should be 'local', 'torchrun' or 'simulate', not \"locall\" (did you mean 'local'?)",
        "x.yaml:4:9: steps.warmup: should be greater than or equal to 0, not -1",
        "x.yaml:4:21: steps.measure: unknown key (did you mean 'measured'?)",
        "x.yaml:6:3: matrix.implementation: a:Zero2 and b:Zero2 would both be called 'zero2' in ids",
        "x.yaml:6:25: matrix.implementation.1: unknown implementation 'zero22' (did you mean 'zero2'?)",
        "x.yaml:6:33: matrix.implementation.2: 'ddp' stands there already",
        'x.yaml:7:3: matrix.model: should be a list, not "mlp-tiny"',
        "x.yaml:8:16: matrix.world_size.0: should be greater than or equal to 1, not 0",
        "x.yaml:8:19: matrix.world_size.1: should be a valid integer, not true",
        "x.yaml:8:25: matrix.world_size.2: should be less than or equal to 4096, not 4097",
        "x.yaml:8:31: matrix.world_size.3: should be greater than or equal to 1, not -2",
        'x.yaml:8:35: matrix.world_size.4: should be a valid integer, not "2"',
        "x.yaml:8:40: matrix.world_size.5: should be a valid integer, not 2.0",
        "x.yaml:9:15: matrix.precision.0: should be 'fp32', 'bf16' or 'fp16', not \"bf61\" (did you mean 'bf16'?)",
        "x.yaml:9:21: matrix.precision.1: should be 'fp32', 'bf16' or 'fp16', not \"no\"",
        "x.yaml:9:25: matrix.precision.2: should be 'fp32', 'bf16' or 'fp16', not 16",
        "x.yaml:10:10: checks.0: unknown check 'memory.at_rst' (did you mean 'memory.at_rest'?)",
        "x.yaml:10:25: checks.1: should be a check's id, such as memory.at_rest, not",
        "x.yaml:11:1: xfial: unknown key (did you mean 'xfail'?)",
        "x.yaml:13:6: xfail.0.implementation: 'zero' is not in matrix.implementation (did you mean 'zero2'?)",
        "x.yaml:13:28: xfail.0.world_size: 7 is not in matrix.world_size: it matches no case",
        "x.yaml:13:43: xfail.0.check: 'traffic.volume' is not among the suite's checks",
        "x.yaml:13:66: xfail.0.reason: should have at least 1 character",
        "x.yaml:14:5: xfail.1.reason: is missing",
        "x.yaml:14:28: xfail.1.resaon: unknown key (did you mean 'reason'?)",
        "x.yaml:15:1: deadline_s:",
        "x.yaml:16:17: options.ddp.x: an option is text, a number or true/false, not [1]",
        "x.yaml:16:25: options.ddp.Bad Key: should be an option's name: small letters, digits and _, not",
        "x.yaml:16:39: options.ddp.y: an option's text stands in ids",
        "x.yaml:16:50: options.zoro: no implementation 'zoro' is in the matrix",
        "x.yaml:17:11: exclude.0: names no axis",
        "x.yaml:17:15: exclude.1: should be an object, not 3",
    ]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=False)] == expected
    assert len(lines) == len(expected)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("version: 1\n", "", "x.yaml:1:1: version: is missing"),
        ("version: 1", "version: 1.0", "x.yaml:1:1: version: should be a valid integer, not 1.0"),
        ("version: 1", "version: yes", 'x.yaml:1:1: version: should be a valid integer, not "yes"'),
        ("world_size: [1, 2, 16]", "world_size: []", "x.yaml:7:3: matrix.world_size: should not be empty, not []"),
        ("world_size: [1, 2, 16]", "world_size: [1, 2, 16, 2]", "x.yaml:7:26: matrix.world_size.3: 2 stands there al"),
        ("world_size: [1, 2, 16]", "world_size: [01, 2, 16, 1]", "x.yaml:7:27: matrix.world_size.3: 1 stands there"),
        ("world_size: [2, 16]", "world_size: [2, 3]", "x.yaml:14:29: xfail.0.world_size: 3 is not in matrix"),
        ("ddp, A: 2}", "ddp}", None),
        ("{implementation: ddp, A: 2}", "{}", "x.yaml:11:5: exclude.0: names no axis"),
        ("{implementation: ddp, A: 2}", "{implementation: zero2}", "x.yaml:14:5: xfail.0: matches no case"),
        ("{implementation: ddp, A: 2}", "{model: [mlp-tiny, gpt-tiny]}", "x.yaml:10:1: exclude: no case is left"),
        ("my-zero:", "my-zeroo:", "x.yaml:16:3: options.my-zeroo: no implementation 'my-zeroo' is in the matrix"),
        ("reason: all-reduce", "reason: no", None),
        ("world_size: [1, 2, 16]", f"world_size: {[*range(1, 1700)]}", "x.yaml:4:1: matrix: 20,388 cases; at most"),
        ("matrix:", "matrix: &m", None),
        ("about: Bytes.", "suite: again", "x.yaml:3:1: suite: duplicate key (first at line 2)"),
    ],
)  # fmt: skip
def test_one_mistake(old, new, says, tmp_path):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    if says is None:
        suite_of(text, tmp_path)
    else:
        lines = refused(text, tmp_path)
        assert lines[0].startswith(says) and len(lines) == 1


def test_what_is_said_a_thousand_times_is_worked_out_once(tmp_path, monkeypatch):
    asked = []

    def counted(axes, picks):
        asked.append(picks)
        return cells(axes, picks)

    monkeypatch.setattr("zerobench.suite.cells", counted)
    monkeypatch.setattr("zerobench.coherence.cells", counted)
    entries = "  - {implementation: ddp, A: 2}\n"
    suite = suite_of(GOOD.replace(entries, entries * 1000), tmp_path)
    assert len(suite.cases()) == 3 * 2 * 3 * 2 - 6 and len(asked) < 6


@pytest.mark.parametrize("spelled", ["my-zero", "./my_zero.py:MyZero"])
def test_an_implementation_is_meant_by_its_name_and_by_its_reference(spelled, tmp_path):
    suite = suite_of(GOOD.replace("implementation: zero2", f'implementation: "{spelled}"'), tmp_path)
    case = next(c for c in suite.cases() if c.implementation == "my-zero" and c.world_size == 2)
    assert suite.xfail_reason(case, "traffic.volume") == "all-reduce"
    suite = suite_of(GOOD.replace("{implementation: ddp, A: 2}", f'{{implementation: "{spelled}"}}'), tmp_path)
    assert {c.implementation for c in suite.cases()} == {"ddp", "zero2"}


def test_names_are_judged_only_where_they_are_known(tmp_path):
    text = GOOD.replace("ddp", "mine").replace("memory.at_rest", "memory.unheard_of")
    assert len(refused(text, tmp_path)) == 2
    suite_of(text, tmp_path, None)
    suite_of(text, tmp_path, Known(models=KNOWN.models))


def test_overrides_and_selection(tmp_path):
    suite = suite_of(GOOD, tmp_path)
    assert [c.id for c in suite.cases(["pkg.mod:Other"], [3], "mlp")] == [
        "other/mlp-tiny/n3/bf16",
        "other/mlp-tiny/n3/bf16/A=2",
    ]
    assert [c.id for c in suite.cases(select="zero2/mlp-tiny/n1/bf16")] == ["zero2/mlp-tiny/n1/bf16"]
    assert [c.id for c in suite.cases(select="model-states::zero2/mlp-tiny/n2/bf16::traffic.volume")] == [
        "zero2/mlp-tiny/n2/bf16"
    ]
    assert suite.cases(select="traffic.volume") == suite.cases()
    assert {c.world_size for c in suite.cases(select="*/n1*")} == {1, 16}
    assert suite.cases(select="nothing") == ()
    for bad in ([0], [-1], [4097], [True], []):
        with pytest.raises(ValueError):
            suite.cases(world_sizes=bad)
    with pytest.raises(ValueError, match="at most 20,000"):
        suite.cases([f"i{k}" for k in range(2000)])
    with pytest.raises(
        ValueError, match=r"a\.py:Mine and b\.py:Mine would both be called 'mine' in ids: give one class"
    ):
        suite.cases(["a.py:Mine", "b.py:Mine"])


def test_exact_selection_comes_before_parts_and_patterns():
    ids = {"s::z/m/n1/bf16::a.b", "s::z/m/n16/bf16::a.b", "s::z/m/n1/bf16::a.bc"}
    assert select_ids("s::z/m/n1/bf16", ids) == {"s::z/m/n1/bf16::a.b", "s::z/m/n1/bf16::a.bc"}
    assert select_ids("a.b", ids) == {"s::z/m/n1/bf16::a.b", "s::z/m/n16/bf16::a.b"}
    assert select_ids("*::a.b?", ids) == {"s::z/m/n1/bf16::a.bc"}
    assert select_ids("n1", ids) == ids


def test_xfail_knows_its_cases(tmp_path):
    suite = suite_of(GOOD, tmp_path)
    case = next(c for c in suite.cases() if c.implementation == "zero2" and c.world_size == 2)
    assert suite.xfail_reason(case, "traffic.volume") == "all-reduce"
    assert suite.xfail_reason(case, "memory.at_rest") is None
    assert suite.xfail_reason(replace(case, world_size=1), "traffic.volume") is None
    written = json.loads(json.dumps(suite.xfail[0].to_json()))
    assert written == {
        "implementation": ["zero2"],
        "world_size": [2, 16],
        "check": "traffic.volume",
        "reason": "all-reduce",
    }
    assert Xfail.from_json(written) == suite.xfail[0]


def test_excuses_in_a_file_of_their_own(tmp_path):
    file = tmp_path / "xfails.yaml"
    file.write_text("- {model: mlp-tiny, check: traffic.volume, reason: known}\n")
    assert load_xfails(file) == (
        Xfail.from_json({"model": ["mlp-tiny"], "check": "traffic.volume", "reason": "known"}),
    )
    file.write_text("- {modle: mlp-tiny, check: traffic.volume, reason: known}\n- {check: volume}\n")
    with pytest.raises(BadFile) as caught:
        load_xfails(file)
    assert [(p.line, p.col, p.path) for p in caught.value.problems] == [
        (1, 4, "0.modle"),
        (2, 3, "1.reason"),
        (2, 4, "1.check"),
    ]
    assert "did you mean 'model'" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("zero1", "zero1"),
        ("./my_zero.py:MyZero", "my-zero"),
        ("a.b:FSDPAdapter", "fsdp-adapter"),
        ("a:ds_1", "ds-1"),
    ],
)
def test_names_in_ids(reference, name):
    assert implementation_name(reference) == name


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["ddp", "model", "memory.at_rest"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["matrix", "exclude", "xfail", "options", "checks", "implementation", "world_size", "A", "check"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(anything)
def test_mistakes_are_told_of_any_data(data):
    for loc, what in mistakes(data, KNOWN):
        assert isinstance(loc, tuple) and what


@pytest.mark.parametrize("name", names())
def test_shipped_suites_are_sound(name):
    suite = load(find(name))
    assert suite.suite == name
    assert suite.about
    first = Path(find(name)).read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../zerobench/schema/suite.schema.json"
    assert all(c.id for c in suite.cases())


def test_the_suites_are_shipped():
    assert {"smoke", "model-states", "traffic", "equivalence"} <= set(names())
    assert find("smoke") == find(str(find("smoke")))
    with pytest.raises(
        LookupError, match=r"no suite 'smoek' \(did you mean 'smoke'\?\); shipped: at-scale, conformance, equivalence"
    ):
        find("smoek")


def test_the_schema_in_the_package_is_current():
    file = Path(zerobench.__file__).parent / "schema" / "suite.schema.json"
    assert json.loads(file.read_text()) == json_schema()


def test_precisions_are_the_terms_own():
    assert get_args(Precision) == PRECISIONS


def test_the_id_of_a_finding_selects_its_check_alone() -> None:
    suite = load(find("smoke"))
    whole = "smoke::zero2/gpt-tiny/n4/bf16::memory.at_rest"
    cases = suite.cases(select=whole)
    assert [case.id for case in cases] == ["zero2/gpt-tiny/n4/bf16"]
    assert suite.selected_checks(cases, whole) == ("memory.at_rest",)
    assert suite.selected_checks(cases, "zero2/gpt-tiny/n4/bf16") == suite.checks
    assert suite.selected_checks(cases, None) == suite.checks
