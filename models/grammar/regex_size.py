"""The size of a regular expression with its repetitions written out."""

import re

_QUANTIFIER = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")


def regex_size(pattern: str) -> int:
    """Characters and classes, each as often as `{m,n}` repeats it. `*`, `+` and `?` repeat nothing: they are loops.

    An estimate for any text, valid or not: the compiler reports errors.
    """
    stack: list[int] = []  # the total before each open group
    total = last = 0  # `last` is the size of the item that a quantifier would repeat
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            last, at = 1, at + 2
            total += 1
            continue
        if character == "[":
            at = _class_end(pattern, at)
            last = 1
            total += 1
            continue
        if character == "{" and (match := _QUANTIFIER.match(pattern, at)) is not None:
            low, high = match[1] or "0", match[3] if match[2] else match[1]
            # an open end `{m,}` is m items and a loop; counts beyond 10 digits are as good as infinite
            times = max(int(low[:10] or 0), int((high or "0")[:10] or 0), 1)
            total += last * (times - 1)
            last *= times
            at = match.end()
            continue
        if character == "(":
            stack.append(total)
            last = 0
        elif character == ")" and stack:
            last = total - stack.pop()
        elif character not in "*+?|":
            last = 1
            total += 1
        at += 1
    return total


def _class_end(pattern: str, at: int) -> int:
    """The index after the class that begins at `at`."""
    at += 1
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
