"""Parses values and calls in Python syntax. Python's parser takes microseconds per token and cannot be interrupted."""

import ast
import re
import warnings

MOST_TOKENS = 8192
"""Longer texts count as text that is not Python. A string is one token."""
STRING = r"""(?:"(?:[^"\\]|\\.)*+(?:"|\Z)|'(?:[^'\\]|\\.)*+(?:'|\Z))"""
_TOKEN = re.compile(rf"{STRING}|\w+|[^\w\s]", re.DOTALL)
_FORMATTED = re.compile(r"(?i:f|rf|fr)[\"']")


def parse_expression(text: str) -> ast.expr:
    """Returns the expression, which is not evaluated. Raises ValueError if it is not one, or is too long."""
    for count, token in enumerate(_TOKEN.finditer(text)):
        if count == MOST_TOKENS:
            raise ValueError(f"more than {MOST_TOKENS} tokens of Python")
        if _FORMATTED.match(text, token.start()):
            raise ValueError("a formatted string is code")
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns about escapes such as "\\d"
            return ast.parse(text, mode="eval").body
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {error}") from None
