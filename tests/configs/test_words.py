"""One of something is not several."""

from pdserve.configs.words import counted


def test_nouns_agree_with_their_number() -> None:
    assert [counted(number, "prompt token") for number in (0, 1, 2)] == [
        "0 prompt tokens",
        "1 prompt token",
        "2 prompt tokens",
    ]
