"""JSON that clients send as text."""

import json
from typing import Any

MAX_DIGITS = 1000
"""Most digits of a number. The time to read one grows with their square, and Python refuses more than 4,300."""


def parse_json(text: str) -> Any:
    """Raises ValueError with what is wrong, to be put after the name of a field."""
    try:
        return json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)
