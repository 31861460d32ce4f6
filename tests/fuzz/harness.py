"""Generates damaged input: EXAMPLES times per check in every run, for a share of PDSERVE_FUZZ_MINUTES in `make fuzz`.

`corpus/NAME/` has inputs of the check NAME that failed once. Every run begins with them.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
CHECKS = 30
"""Number of tests that call `fuzz` or `search_until`. They share the time of `make fuzz`."""
SHARE_S = 60 * float(os.environ.get("PDSERVE_FUZZ_MINUTES", "0")) / CHECKS
EXAMPLES = 30 if SHARE_S == 0 else 100 if SHARE_S < 60 else 500
NUMBERS = (-1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [*NUMBERS, 0.5, 1e308, None, True, "", "x", "\0", b"", [], {}, [[]], [None], {"": None}]
)

T = TypeVar("T")


def fuzz(strategy: st.SearchStrategy[T], check: Callable[[T], None]) -> None:
    """Call `check` with generated examples. If it raises, the test fails with the smallest example that raises."""

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def example(value: T) -> None:
        check(value)

    search_until(example)


def search_until(example: Callable[[], None]) -> None:
    """Run a Hypothesis test at least once, and until its share of the time is over."""
    ends_at = time.monotonic() + SHARE_S
    example()
    while time.monotonic() < ends_at:
        example()


def kept(name: str) -> list[bytes]:
    """The inputs in the corpus of a check."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def damaged(seed: bytes) -> st.SearchStrategy[bytes]:
    """The bytes of `seed` with a few changes: other bytes, wrong numbers, parts removed, repeated or inserted."""
    at = st.integers(0, max(0, len(seed) - 1))
    numbers = st.sampled_from([number % 2**64 for number in NUMBERS]).flatmap(
        lambda number: st.sampled_from([1, 2, 4, 8]).map(
            lambda size: (number % 2 ** (8 * size)).to_bytes(size, "little")
        )
    )
    changes = st.tuples(at, st.integers(0, 16), numbers | st.binary(max_size=8))

    def apply(chosen: list[tuple[int, int, bytes]]) -> bytes:
        data = bytearray(seed)
        for position, length, replacement in chosen:
            data[position : position + length] = replacement
        return bytes(data)

    cut = st.integers(0, len(seed)).map(lambda length: seed[:length])
    return st.lists(changes, min_size=1, max_size=4).map(apply) | cut


def altered(value: Any) -> st.SearchStrategy[Any]:
    """`value`, of JSON or msgpack types, with one or two of its parts replaced, removed or repeated."""

    def change(steps: tuple[list[int], str, Any]) -> Any:
        path, action, replacement = steps
        return _changed(value, path, action, replacement)

    steps = st.tuples(
        st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from(["set", "remove", "repeat"]), ODD
    )
    once = steps.map(change)
    return once | once.flatmap(
        lambda first: steps.map(lambda more: _changed(first, *more))  # two changes
    )


def _changed(value: Any, path: list[int], action: str, replacement: Any) -> Any:
    """A copy with one changed part. `path` chooses a child at each level and may end early at a leaf."""
    if not isinstance(value, (list, dict)) or not value or not path:
        return replacement
    copy = value.copy()
    keys = list(range(len(copy))) if isinstance(copy, list) else list(copy)
    key = keys[path[0] % len(keys)]
    if len(path) > 1 and isinstance(copy[key], (list, dict)) and copy[key]:
        copy[key] = _changed(copy[key], path[1:], action, replacement)
    elif action == "remove":
        del copy[key]
    elif action == "repeat" and isinstance(copy, list):
        copy += [copy[key]] * 3
    else:
        copy[key] = replacement
    return copy


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda odd: odd.decode("latin-1")).encode()
