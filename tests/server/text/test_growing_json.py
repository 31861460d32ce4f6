"""JSON that grows by appending equals the JSON of the whole value, and an append takes the same time at any length."""

import json
import time

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.server.text.growing_json import GrowingArray, GrowingString


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(max_size=8), max_size=8))
def test_growing_string_equals_the_json_of_the_whole(pieces: list[str]) -> None:
    growing = GrowingString()
    for count, piece in enumerate(pieces, 1):
        growing.append(piece)
        assert json.loads(msgspec.json.encode({"text": growing.encoded()})) == {"text": "".join(pieces[:count])}


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.one_of(st.none(), st.integers(-9, 9), st.lists(st.text(max_size=3), max_size=3)), max_size=8))
def test_growing_array_equals_the_json_of_the_whole(values: list[object]) -> None:
    growing = GrowingArray()
    assert json.loads(msgspec.json.encode(growing.encoded())) == []
    for count, value in enumerate(values, 1):
        growing.append(value)
        assert json.loads(msgspec.json.encode(growing.encoded())) == values[:count]


def test_long_array_is_not_encoded_again() -> None:
    """An event of 8000 tokens with their logprobs is at least five times cheaper than encoding all of them."""
    entries = [(-0.123456789 * index, index, None) for index in range(8000)]
    growing = GrowingArray()
    for entry in entries:
        growing.append(entry)

    def best_of(runs: int, encode: object) -> float:
        assert callable(encode)
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            encode()
            times.append(time.perf_counter() - started)
        return min(times)

    again = best_of(20, lambda: msgspec.json.encode(entries))
    once = best_of(20, lambda: msgspec.json.encode(growing.encoded()))
    assert once * 5 < again
