"""Formatting of numbers and values."""

from pdserve.common.words import counted


def test_counted_uses_singular_and_plural() -> None:
    assert [counted(number, "prompt token") for number in (0, 1, 2)] == [
        "0 prompt tokens",
        "1 prompt token",
        "2 prompt tokens",
    ]
