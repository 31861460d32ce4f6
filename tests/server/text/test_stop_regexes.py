"""Stop expressions in text that arrives in pieces, compared with `re` on the text so far.

An expression may end a match only in a piece that is `armed`: after `min_new_tokens`.
"""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.server.text.regex_automata import MAX_SIZE, StopRegexError, compile_stop_regex
from pdserve.server.text.stop_regexes import MAX_MATCH_CHARACTERS, StopRegexes

ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\s", "(?i:A)", r"\n"])


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(inner, inner)
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{1,}", "*?", "+?"])
    return st.one_of(
        pairs.map("".join), pairs.map("|".join), st.tuples(inner, repeats).map(lambda part: f"(?:{part[0]}){part[1]}")
    )


PATTERNS = st.recursive(ATOMS, combined, max_leaves=6)
PIECES = st.lists(st.tuples(st.text(alphabet="abcA \n", max_size=3), st.booleans()), max_size=8)


def reference(pieces: list[tuple[str, bool]], patterns: list[str]) -> tuple[int, int, str] | None:
    """Start, end and pattern of the match that ends first: tries every end and every start in the whole text."""
    text = "".join(piece for piece, _ in pieces)
    armed = [armed for piece, armed in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        found = [
            (start, pattern)
            for start in range(end + 1)
            for pattern in patterns
            if re.compile(pattern).fullmatch(text, start, end)
        ]
        if found and armed[end - 1]:
            start = min(start for start, _ in found)
            return start, end, next(pattern for pattern in patterns if (start, pattern) in found)
    return None


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, patterns=st.lists(PATTERNS, min_size=1, max_size=2), show_stop=st.booleans())
def test_result_does_not_depend_on_the_pieces(
    pieces: list[tuple[str, bool]], patterns: list[str], show_stop: bool
) -> None:
    patterns = [pattern for pattern in patterns if not re.fullmatch(pattern, "")] or ["a"]
    text = "".join(piece for piece, _ in pieces)
    match = reference(pieces, patterns)
    expected = text if match is None else text[: match[1] if show_stop else match[0]]
    stops = StopRegexes([], map(compile_stop_regex, patterns), show_stop)
    shown = ""
    for piece, armed in pieces:
        shown += stops.push(piece, armed)
        assert expected.startswith(shown), "text was shown that belongs to a match"
        if stops.matched is not None:
            break
    assert (shown + stops.finish(), stops.matched) == (expected, match and match[2])


def run(pieces: list[str], *patterns: str, strings: tuple[str, ...] = ()) -> tuple[str, str | None]:
    stops = StopRegexes(strings, map(compile_stop_regex, patterns))
    shown = ""
    for piece in pieces:
        shown += stops.push(piece)
        if stops.matched is not None:
            break
    return shown + stops.finish(), stops.matched


@pytest.mark.parametrize(
    ("pattern", "pieces", "shown"),
    [
        (r"[.!?]\s*$", ["One. Two", ".", " Three"], "One. Two"),  # as in SGLang, $ matches at the end of each piece
        (r"[.!?]\s*$", ["One.", " Two"], "One"),
        (r"\bend\b", ["the", " ending", " end", "ed"], "the ending "),
        (r"\bend\b", ["weekend", "."], None),
        (r"^\d", ["a1"], None),
        (r"(?m)^\d", ["a1\n", "2"], "a1\n"),
        (r"\Aab", ["a", "b"], ""),
        (r"ab\Z", ["abc", "ab"], "abc"),
        (r"(?i)stop", ["a StO", "P b"], "a "),
        (r"foo.*bar", ["a foo", " b", "ar"], "a "),
        (r"é+!", ["caf", "éé", "!"], "caf"),
    ],
)
def test_anchors_flags_and_matches_across_pieces(pattern: str, pieces: list[str], shown: str | None) -> None:
    expected = ("".join(pieces), None) if shown is None else (shown, pattern)
    assert run(pieces, pattern) == expected


def test_match_that_ends_first_is_used() -> None:
    assert run(["one two three"], r"t\w+e", strings=("two",)) == ("one ", "two")
    assert run(["one two three"], r"n\d", strings=("too",)) == ("one two three", None)
    assert run(["one two three"], r"ne", strings=("two",)) == ("o", "ne")
    assert run(["o", "n", "e tw", "o"], r"ne\d", strings=("two",)) == ("one ", "two")


def test_only_a_possible_match_is_held_back() -> None:
    stops = StopRegexes(["xyz"], [compile_stop_regex(r"ab\d")])
    assert [stops.push(piece) for piece in ("a", "b", "a", "b-", "xy", "a")] == ["", "", "ab", "ab-", "", "xy"]
    assert stops.finish() == "a"


def test_stop_string_in_a_piece_that_is_not_armed_is_shown_at_once() -> None:
    stops = StopRegexes(["xyz"], [compile_stop_regex(r"ab\d")])
    assert [stops.push("-xyz", armed=False), stops.push("-"), stops.push("xyz")] == ["-xyz", "-", ""]
    assert stops.matched == "xyz"


def test_match_over_the_length_limit_is_not_found() -> None:
    stops = StopRegexes([], [compile_stop_regex(r"<.*>")])
    shown = stops.push("<" + "x" * (MAX_MATCH_CHARACTERS + 10))
    assert len(shown) >= 11
    assert stops.push(">") + stops.finish() != ""
    assert stops.matched is None


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "is not a valid regular expression: missing \\)"),
        ("a{1,99999999999999999999}", "is not a valid regular expression"),
        ("", "matches the empty text"),
        (r"x*", "matches the empty text"),
        (r"\s*$", "matches the empty text"),
        (r"(?=a)a", "has look-around, which is not supported"),
        (r"(?<!a)b", "has look-around, which is not supported"),
        (r"(a)\1", "has a back-reference, which is not supported"),
        (r"a++b", "has a possessive repetition, which is not supported"),
        (r"((a{1000}){1000}){1000}", f"is too large: .* {MAX_SIZE} items"),
        (r"((){1000}){1000}a", f"is too large: .* {MAX_SIZE} items"),
        (
            "(?i)" + "".join(f"[\u0100-{chr(0xFF00 + number)}]" for number in range(40)),
            "is too large: the ranges of its character classes",
        ),
    ],
)
def test_unsupported_expressions_are_refused(pattern: str, problem: str) -> None:
    with pytest.raises(StopRegexError, match=problem):
        compile_stop_regex(pattern)


def test_deeply_nested_expression_is_compiled() -> None:
    pattern = "b" + "(?:" * 200 + "a" + ")*" * 200
    assert run(["-", "b", "a"], pattern) == ("-", pattern)


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(a?){40}a{40}b", r"(.*.*.*)*x"])
def test_expression_that_defeats_backtracking_takes_linear_time(pattern: str) -> None:
    """`re` backtracks and would take years."""
    started = time.monotonic()
    assert run(["a" * 100] * 5, pattern)[1] is None
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("pattern", [r"(?:.*\b){60}Q", r"(?:a*b?){60}Q"])
def test_large_expression_takes_as_long_as_a_small_one_when_its_text_repeats(pattern: str) -> None:
    stops, started = StopRegexes([], [compile_stop_regex(pattern)]), time.process_time()
    for _ in range(2500):
        stops.push("aaaa")
    assert time.process_time() - started < 0.4  # 0.05 s; 0.9 s and more if the states are followed for each character


def test_repeated_class_of_many_characters_is_compiled_once() -> None:
    """`re` takes 30 ms for this class. 200 copies of it would block the event loop for seconds."""
    started = time.monotonic()
    compile_stop_regex("(?i)[\u0100-\uffff]{200}x")
    assert time.monotonic() - started < 2


def test_long_stop_strings_take_the_time_of_short_ones() -> None:
    strings = tuple("a" * (256 - number) for number in range(16))
    started = time.monotonic()
    assert run(["a" * 200 + "b"] * 50, "x", strings=strings)[1] is None
    assert time.monotonic() - started < 10
