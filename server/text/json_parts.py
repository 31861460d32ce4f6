"""Counts what a JSON body consists of before it is decoded: decoding holds the interpreter's lock.

4 MiB of `[],` take half a second and stop all threads; 4 MiB of token ids or text take less than 50 ms.
"""

from ...models.grammar.json_text import MAX_DIGITS

MOST_PARTS = 100_000
"""Most objects, arrays and strings of a body, and most elements of its objects and arrays together."""
MOST_LISTS = 10_000
"""Most objects and arrays beside more elements than that: a call has fewer prompts, of however many token ids."""
_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = (MAX_DIGITS + 1) * b"0"


def find_excess(body: bytes, *, counts_numbers: bool = True) -> str | None:
    """Returns what a body has too much of, for an error message; None if it can be decoded. Does not look at most
    bodies byte by byte. Without `counts_numbers`, there may be many elements in few lists: prompts of token ids are
    long.
    """
    if body.count(b"[") + body.count(b"{") + body.count(b'"') // 2 > MOST_PARTS:
        plain = _without_escapes(body)
        strings = plain.count(b'"') // 2
        parts = strings + (_containers(_without_strings(body)) if strings <= MOST_PARTS else 0)
        if parts > MOST_PARTS:
            return f"{parts} objects, arrays and strings; at most {MOST_PARTS} are allowed"
    if (counts_numbers or _containers(body) > MOST_LISTS) and body.count(b",") > MOST_PARTS:
        rest = _without_strings(body)
        elements, lists = rest.count(b",") + _containers(rest), _containers(rest)
        if elements > MOST_PARTS and not counts_numbers and lists > MOST_LISTS:
            return (
                f"{elements} elements in {lists} objects and arrays; at most {MOST_PARTS} in {MOST_LISTS} are allowed"
            )
        if elements > MOST_PARTS and counts_numbers:
            return f"{elements} elements of objects and arrays; at most {MOST_PARTS} are allowed"
    if len(body) > MAX_DIGITS and _TOO_MANY_DIGITS in body.translate(_TO_ZEROS):
        zeros = _without_strings(body).translate(_TO_ZEROS)
        if (at := zeros.find(_TOO_MANY_DIGITS)) >= 0:
            digits = len(zeros) - at - len(zeros[at:].lstrip(b"0"))
            return f"a number of {digits} digits; at most {MAX_DIGITS} are allowed"
    return None


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _without_escapes(body: bytes) -> bytes:
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _without_strings(body: bytes) -> bytes:
    """To be called when there are not too many: each takes memory for a moment."""
    return b" ".join(_without_escapes(body).split(b'"')[::2])
