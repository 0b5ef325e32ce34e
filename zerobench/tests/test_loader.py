"""Strict YAML: what is read, what is refused, and where it says so."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.loader import MAX_DEPTH, MAX_NODES, SHOWN, BadFile, did_you_mean, parse, read


def refused(text: str | bytes) -> list[str]:
    with pytest.raises(BadFile) as caught:
        parse(text, "x.yaml")
    return str(caught.value).split("\n")


def test_scalars_are_yaml_1_2():
    data = parse(
        "{a: no, b: on, c: 22:30, d: 010, e: 1_000, f: 2024-01-01, g: 1e-3, h: 0x1F, i: 0o17, j: True, k: ~, l: , m: =,"
        " n: 'true', o: -.inf, p: +1.5, q: '1', r: yes, s: .5, t: Null, u: -0}"
    ).data
    assert data == {
        "a": "no",
        "b": "on",
        "c": "22:30",
        "d": 10,
        "e": "1_000",
        "f": "2024-01-01",
        "g": 0.001,
        "h": 31,
        "i": 15,
        "j": True,
        "k": None,
        "l": None,
        "m": "=",
        "n": "true",
        "o": -math.inf,
        "p": 1.5,
        "q": "1",
        "r": "yes",
        "s": 0.5,
        "t": None,
        "u": 0,
    }
    assert parse("on: 1").data == {"on": 1}
    assert math.isnan(parse("a: .NaN").data["a"])


def test_marks_are_those_of_keys_and_items():
    document = parse("a:\n  - x\n  - {b: 1,  c: 2}\n")
    assert document.marks == {
        (): (1, 1),
        ("a",): (1, 1),
        ("a", 0): (2, 5),
        ("a", 1): (3, 5),
        ("a", 1, "b"): (3, 6),
        ("a", 1, "c"): (3, 13),
    }
    assert document.problem(("a", 1, "d", 7), "is odd").text("f") == "f:3:5: a.1.d.7: is odd"


def test_all_problems_come_at_once_in_the_order_of_the_file():
    assert refused("a: 1\nb: !!python/object:os.system {}\n? [k]\n: 2\na: 3\n1: 4\nc: {<<: {}}\nd: !mine 5\n") == [
        "x.yaml:2:4: b: the tag 'tag:yaml.org,2002:python/object:os.system' is refused: plain values only",
        "x.yaml:3:3: a key must be text, not a list or a mapping",
        "x.yaml:5:1: a: duplicate key (first at line 1)",
        "x.yaml:6:1: a key must be text: quote '1'",
        "x.yaml:7:5: c: the merge key '<<' is not YAML 1.2: write the keys out",
        "x.yaml:8:4: d: the tag '!mine' is refused: plain values only",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x.yaml: the file is empty"),
        ("# only this\n", "x.yaml: the file is empty"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1: expected a single document in the stream"),
        ("a: [1, 2\nb: 3\n", "x.yaml:2:2: while parsing a flow sequence"),
        ("a: *b\n", "x.yaml:1:4: found undefined alias"),
        ("a: &x [*x]\n", "x.yaml:1:4: a.0: the alias stands inside what it names"),
        ("a: b\tc: d\n", "x.yaml:1:5: while scanning for the next token, found character"),
        (b"a: 1\nb: \xff\n", "x.yaml:2:4: byte 0xff is not UTF-8"),
        ("a: 1\nb: \x07\n", "x.yaml:2:4: character"),
        ('a: "\\e[31m"\n', "x.yaml:1:4: a: control characters are refused"),
        ('a: "\\ud800"\n', "x.yaml:1:4: a: control characters are refused"),
        ('a: "\\UFFFFFFFF"\n', "x.yaml: not YAML: "),
        ("a: !!int x\n", "x.yaml:1:4: a: 'x' is not of the type int"),
        ("a: !!binary aGk=\n", "x.yaml:1:4: a: the tag"),
        ("a: 99999999999999999999\n", "x.yaml:1:4: a: a whole number of more than 64 bits"),
        ("a: " + "9" * 5000, "x.yaml:1:4: a: a whole number of more than 64 bits"),
    ],
)
def test_what_is_refused(text, says):
    assert refused(text)[0].startswith(says)


@pytest.mark.parametrize("nest", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "}" * 3000, "- " * 400 + "x"])
def test_deep_nesting_is_refused_before_it_hurts(nest):
    assert f"nested deeper than {MAX_DEPTH} levels" in refused(nest)[0]


def test_nesting_by_alias_counts_too():
    chain = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, MAX_DEPTH + 1))
    assert "nested deeper" in refused(chain)[0]
    assert parse("a: &a [1]\nb: [*a, *a]\n").data["b"] == [[1], [1]]


def test_alias_bombs_and_large_files_are_refused():
    bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True):
        bomb += f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    assert f"more than {MAX_NODES:,} values" in refused(bomb)[0]
    assert f"more than {MAX_NODES:,} values" in refused(f"[{'x,' * (MAX_NODES + 1)}]")[0]
    long = f"a: &a {'x' * 300_000}\nb: [*a, *a, *a]\n"
    assert "aliases expanded" in refused(long)[0]
    assert refused("a: " + "x" * 1_000_000) == ["x.yaml: larger than 1,000,000 bytes: is this the right file?"]


def test_files(tmp_path):
    good = tmp_path / "good.yaml"
    good.write_bytes(b"\xef\xbb\xbfa: \xe2\x82\xac\n")  # a byte-order mark is no text
    assert read(good).data == {"a": "€"}
    assert read(good).marks["a",] == (1, 1)
    assert read(good).text == "a: €\n"
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(BadFile, match=r"No such file|Is a directory"):
            read(path)


def test_a_thousand_problems_are_counted_and_the_first_are_told():
    lines = refused("".join(f"{i}: x\n" for i in range(1000)))
    assert (
        len(lines) == SHOWN + 1 and lines[0].startswith("x.yaml:1:1: ") and lines[-1] == "x.yaml: and 950 more problems"
    )
    with pytest.raises(BadFile) as caught:
        parse(f"a: !x{'x' * 5000} 1\n", "x.yaml")
    assert len(str(caught.value)) < 1300 and "5,0" in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_files_are_read(kind, tmp_path):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)  # who opens it to read waits for one who writes
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(BadFile, match=f"{kind}: cannot be read: "):
        read(path)


def test_nearest_spelling():
    assert did_you_mean("x" * 1_000_000, ["x" * 100]) == ""
    assert did_you_mean("world_sise", ["world_size", "model"]) == " (did you mean 'world_size'?)"
    assert did_you_mean("xyz", ["world_size", "model"]) == ""


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text("abc é\n:#-", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_data_survives(data):
    assert parse(json.dumps(data)).data == data  # JSON is YAML 1.2


@given(st.text("ab:-?[]{}&*!|>'\"%@#,. \n\t0x~<=", max_size=40))
def test_nothing_but_bad_file_is_ever_raised(text):
    try:
        document = parse(text)
    except BadFile as error:
        assert error.problems
    else:
        assert () in document.marks
