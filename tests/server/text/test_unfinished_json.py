"""Texts that end inside JSON, and prose with brackets."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.server.text.unfinished_json import ends_inside_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1) | st.dictionaries(st.text(), VALUES, min_size=1), st.booleans(), st.data())
def test_text_that_ends_in_the_middle_of_json_is_unfinished(value: object, escaped: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(1, len(text) - 1))
    before = data.draw(st.sampled_from(["", "Here: ", "```json\n", 'The "{" of } and ', "See [1] and [the list: "]))
    assert ends_inside_json(before + text[:cut])
    assert not ends_inside_json(f"{before}{text}")
    assert not ends_inside_json(f"{before}{text}\n``` is the answer.")


@pytest.mark.parametrize(
    "text",
    [
        "",
        'The format is "{" then.',
        'Write "[" and "{", then "a".',
        "A set {1, 2, an interval [0, 1) and a list [the",
        "See [1] and {}.",
        "Use {x} or ${HOME} or f({a",
        'The key "a" of {"a": 1}',
        "} and ]",
        "Hm [e",
    ],
)
def test_brackets_in_prose_are_not_json(text: str) -> None:
    assert not ends_inside_json(text)


@pytest.mark.parametrize(
    "text",
    [
        'text } and {"a": 1',
        '[" is a bracket. {"a": 1',
        'A 5" pipe: {"a": 1',
        'He said "so {"a": 1',
        "{",
        "Here:\n[1, ",
        '[1] {"a": "}',
        "[" * 5000,
        "[" + "1" * 5000,
    ],
)
def test_json_after_prose_is_found(text: str) -> None:
    assert ends_inside_json(text)


@pytest.mark.parametrize(
    "part", ["[", "[1,", '["a",', '[" ', '{"a":', '"', "[[1]x", '["[', "[" * 900 + "x", "{", '["\\', '[" \n']
)
def test_long_text_takes_linear_time(part: str) -> None:
    started = time.process_time()
    ends_inside_json(part * (400_000 // len(part)) + "x")
    assert time.process_time() - started < 4  # at most 1 s; with an error of the json module for each bracket 10 s
