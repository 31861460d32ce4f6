"""Formats numbers and values for messages."""

import re

import msgspec

LONGEST_SHOWN = 60
OUT_OF_MEMORY = " (probably out of memory: by the limit of the container, or of the machine)"
"""Follows a SIGKILL that we did not send."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def counted(number: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: object) -> str:
    """A value for an error message: its JSON, shortened; containers by their size."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {counted(len(value), 'field')}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return shortened(msgspec.json.encode(value).decode() if isinstance(value, str | bool | None) else repr(value))


def whole_characters(text: str) -> str:
    r"""The text with replacement characters for lone surrogates: JSON may have them as escapes, such as `\ud83d`, but
    neither a tokenizer nor a response can.
    """
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str, longest: int = LONGEST_SHOWN) -> str:
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
