"""Counts what a JSON body consists of before it is decoded: decoding holds the interpreter's lock.

4 MiB of `[],` take half a second and stop all threads; 4 MiB of token ids or text take less than 50 ms.
"""

import re

from ....models.grammar.json_text import MAX_DIGITS

MOST_PARTS = 100_000
"""Most objects, arrays and strings of a body. Token ids and other numbers are not counted."""
_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = (MAX_DIGITS + 1) * b"0"
_NUMBER = re.compile(rb"[0-9]+")


def find_excess(body: bytes) -> str | None:
    """Returns what a body has too much of, for an error message; None if it can be decoded. Does not look at most
    bodies byte by byte.
    """
    if len(body) > MAX_DIGITS and _TOO_MANY_DIGITS in body.translate(_TO_ZEROS):
        digits = max(map(len, _NUMBER.findall(_without_strings(body).translate(_TO_ZEROS))), default=0)
        if digits > MAX_DIGITS:
            return f"a number of {digits} digits; at most {MAX_DIGITS} are allowed"
    if len(body) <= MOST_PARTS or body.count(b"[") + body.count(b"{") + body.count(b'"') // 2 <= MOST_PARTS:
        return None
    plain = _without_escapes(body)
    strings = plain.count(b'"') // 2
    rest = b" ".join(plain.split(b'"')[::2]) if strings <= MOST_PARTS else b""
    parts = strings + rest.count(b"[") + rest.count(b"{")
    return f"{parts} objects, arrays and strings; at most {MOST_PARTS} are allowed" if parts > MOST_PARTS else None


def _without_escapes(body: bytes) -> bytes:
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _without_strings(body: bytes) -> bytes:
    return b" ".join(_without_escapes(body).split(b'"')[::2])
