"""Stop strings in text that arrives in pieces: found wherever the text is cut, and no part of them is shown.

A stop string may end only in a piece that is `armed`: after `min_new_tokens`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.server.text.stop_strings import StopStrings

PIECES = st.lists(st.tuples(st.text(alphabet="abc", max_size=4), st.booleans()), max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def reference(pieces: list[tuple[str, bool]], stops: list[str], show_stop: bool) -> tuple[str, str | None]:
    """The text to show and the stop string: tries every end in the whole text, one after the other."""
    text = "".join(piece for piece, _ in pieces)
    armed = [armed for piece, armed in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and armed[end - 1]:
            stop = max(ending, key=len)
            return text[: end if show_stop else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(pieces=PIECES, stops=STOPS, show_stop=st.booleans())
def test_result_does_not_depend_on_the_pieces(
    pieces: list[tuple[str, bool]], stops: list[str], show_stop: bool
) -> None:
    expected, expected_stop = reference(pieces, stops, show_stop)
    matcher = StopStrings(stops, show_stop)
    shown = ""
    for piece, armed in pieces:
        shown += matcher.push(piece, armed)
        assert expected.startswith(shown), "text was shown that belongs to a stop string"
        if matcher.matched is not None:
            break
    shown += matcher.finish()
    assert (shown, matcher.matched) == (expected, expected_stop)


@pytest.mark.parametrize("cut", range(len("one STOP two") + 1))
def test_stop_string_is_found_when_cut_at_any_position(cut: int) -> None:
    text = "one STOP two"
    matcher = StopStrings(["STOP"])
    shown = matcher.push(text[:cut])
    if matcher.matched is None:
        shown += matcher.push(text[cut:])
    assert (shown, matcher.matched) == ("one ", "STOP")


def test_only_a_possible_stop_string_is_held_back() -> None:
    matcher = StopStrings(["abab", "xyz"])
    shown = [matcher.push(character) for character in "abaabaxyabx"]
    assert shown == ["", "", "", "aba", "", "", "aba", "", "xy", "", "ab"]
    assert matcher.finish() == "x"


@pytest.mark.parametrize(("stop", "text"), [("aab", "aaab"), ("ababc", "xabababc")])
def test_stop_string_that_begins_inside_its_own_failed_beginning_is_found(stop: str, text: str) -> None:
    matcher = StopStrings([stop])
    shown = "".join(matcher.push(character) for character in text)
    assert (shown, matcher.matched) == (text.removesuffix(stop), stop)
