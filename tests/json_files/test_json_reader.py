"""JSON as it is read: strictly, within limits; a fault is an error of the family with line and place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardwright.errors import PlanError, SettingError
from shardwright.json_files.json_reader import DEPTH, DIGITS, parse, read_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def read(text: str) -> object:
    return parse(text, PlanError, "the plan", "plan.json", "a file that Plan.save wrote")


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_values_come_back(value: object, ascii_alone: bool, indent: int | None) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii_alone, indent=indent)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        with pytest.raises(PlanError, match="half of a surrogate pair"):
            read(json.dumps(value))
        return
    assert read(text) == value


@pytest.mark.parametrize(
    "text, line, says",
    [
        (
            '{"a": 1,\n\n"b": {"c.d": [1, {"x": 1,\n"y": 2, "x": [3]}]}}',
            4,
            'at b["c.d"][1].x: "x" stands twice in one object: 1 and [3]',
        ),
        ('{"a": 1, "\\u0061": 2}', 1, 'at a: "a" stands twice'),
        ("[1,\nNaN]", 2, "at [1]: NaN is no number of JSON"),
        ('{"a": -Infinity}', 1, "at a: -Infinity is no number"),
        ('{"a": {"b": [0, 1e999]}}', 1, "at a.b[1]: the number 1e999 is beyond those of 64 bits"),
        ('{"n": ' + "9" * 10_000 + "}", 1, "at n: an integer of 10,000 digits, and at most 100 are read"),
        ('{"n": -' + "9" * (DIGITS + 1) + "}", 1, "at n: an integer of 101 digits"),
        ("[" * 100_000 + "]" * 100_000, 1, "objects and lists are more than 100 deep"),
        ('{"a":\n' * 60 + '[{"b": ' * 30 + "1" + "}]" * 30 + "}" * 60, 61, "more than 100 deep"),
        ("[" * 101 + "]" * 101, 1, "more than 100 deep"),
        ("[" * 100_000, 1, "more than 100 deep"),
        ('{"\\q": 1,\n"\\ud800": ' + "[" * 200, 2, "more than 100 deep"),
        ('{"a": "\\ud800"}', 1, 'at a: the text "\\ud800" has half of a surrogate pair'),
        ('{"\\udc00": 1}', 1, 'at ["\\udc00"]'),
        ("", 1, "cut short: Expecting value"),
        ('{"a": 1,\n "b": "x', 2, "cut short: Unterminated string"),
        ("[[[[", 1, "cut short"),
        ("{}\n}", 2, "cut short: Extra data"),
        ('{"a": tru}', 1, "cut short"),
    ],
)
def test_a_fault_is_named_with_line_and_place(text: str, line: int, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(text)
    assert says in caught.value.message and caught.value.source == f"plan.json:{line}"
    assert caught.value.legal == "a file that Plan.save wrote" and len(str(caught.value)) < 300
    str(caught.value).encode()


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEPTH + "]" * DEPTH,
        '{"n": ' + "9" * DIGITS + "}",
        '{"n": "' + "9" * 10_000 + '", "brackets": "' + "[{" * 1000 + '", "quote": "\\"[[[[\\\\", "e": "NaN"}',
        '{"a": {"x": 1}, "b": {"x": 1}}',
        '"\\ud83d\\ude00"',
    ],
)
def test_limits_take_what_is_at_them(text: str) -> None:
    assert read(text) == json.loads(text)


def test_depth_is_measured_before_the_parser_recurses(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(10**6)  # the parser would run out of the stack of its thread
        with pytest.raises(PlanError, match="more than 100 deep"):
            read('{"a":' * 1_000_000)
    finally:
        sys.setrecursionlimit(limit)


def test_files(tmp_path: Path) -> None:
    path, legal = tmp_path / "x.json", "a file with an object"
    path.write_text('{"a": [1]}')
    assert read_object(path, SettingError, "the file", legal, 100) == ('{"a": [1]}', {"a": [1]})
    for content, says in (
        (b"[1]", "the file is a list, and no object"),
        (b"null", "the file is null, and no object"),
        (b"\xff\xfe", "the file cannot be read: it is not text, from byte 0 on"),
        (b" " * 1001, "the file has 1,001 bytes, and at most 100 are read"),
    ):
        path.write_bytes(content)
        with pytest.raises(SettingError) as caught:
            read_object(path, SettingError, "the file", legal, 100)
        assert says in caught.value.message and caught.value.source == str(path) and legal in caught.value.legal
    for odd, says in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null"),
        ("/dev/zero", "at most 100"),
    ):
        with pytest.raises(SettingError, match=says):
            read_object(odd, SettingError, "the file", legal, 100)
