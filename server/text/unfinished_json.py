"""Tells whether a text ends inside JSON that it has begun, or only has brackets in its prose."""

import re

_OPENING = re.compile(r'(?<!\w)"[^"\n]*"(?!\w)|[{\[]')
"""A quotation, whose brackets are prose, or a bracket that may begin JSON."""
_SPACE = r"[ \t\r\n]*+"
_CHARACTERS = r'[^"\\\x00-\x1f]*+'
_STRING = rf'"{_CHARACTERS}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_CHARACTERS})*+'
_NUMBER = r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?"
_TOKEN = re.compile(rf'{_SPACE}({_STRING}"|{_NUMBER}|true|false|null|[][{{}},:])')
_CUT_OFF = re.compile(
    rf"{_SPACE}({_STRING}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|-|t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|(?<=\d)(?:\.|[eE][+-]?))?"
)
"""The end of a text that ends inside a token, or between two."""
_VALUE = '"-0123456789tfn{['


MOST_CHARACTERS = 1 << 16
"""A character takes up to two microseconds. Texts over 16 KiB are checked in threads, token by token: others may run in
between (server/api/service/lanes.py).
"""


def ends_inside_json(text: str) -> bool:
    """Whether a JSON object or array begins in the text, and the text ends before it. Takes linear time."""
    at = 0
    while (found := _OPENING.search(text, at)) is not None:
        at = found.end()
        if len(found[0]) == 1:
            end = _end_of_json(text, found.start())
            if end is None:
                return True
            at = max(at, end)
    return False


def _end_of_json(text: str, at: int) -> int | None:
    """Returns where the JSON that begins with the bracket at `at` ends; None if the text ends before. If something else
    than JSON follows, returns where to look for the next bracket: those up to here are closed, or fail here too.
    """
    closing: list[str] = []
    wanted, is_key, last = "{[", False, ""
    """The first characters that the next token may have, whether it is a key, and the token before."""
    while (found := _TOKEN.match(text, at)) is not None and found[1][0] in wanted:
        at, last = found.end(), found[1]
        match last[0]:
            case "{":
                closing.append("}")
                wanted, is_key = '"}', True
            case "[":
                closing.append("]")
                wanted = f"{_VALUE}]"
            case "}" | "]":
                closing.pop()
                if not closing:
                    return at
                wanted, is_key = f",{closing[-1]}", False
            case ",":
                is_key = closing[-1] == "}"
                wanted = '"' if is_key else _VALUE
            case ":":
                wanted = _VALUE
            case _:
                wanted, is_key = ":" if is_key else f",{closing[-1]}", False
    rest = _CUT_OFF.fullmatch(text, at)
    if rest is not None and (not rest[1] or rest[1][0] in f"{wanted}.eE"):
        return None
    # a quotation mark before the failure may begin a string instead of ending one
    return at - len(last) if last[0] == '"' else at
