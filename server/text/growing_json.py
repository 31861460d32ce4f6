"""JSON values that only grow, encoded once: a stream of cumulative events copies bytes instead of encoding them again.

The n-th event of a stream repeats what the n - 1 before it said, because clients of that API expect it. The bytes are
the contract; encoding every token of the output again for every new token need not be.
"""

import msgspec


class GrowingString:
    """A JSON string."""

    def __init__(self) -> None:
        self._json = bytearray(b'"')

    def append(self, text: str) -> None:
        self._json += msgspec.json.encode(text)[1:-1]

    def encoded(self) -> msgspec.Raw:
        return msgspec.Raw(self._json + b'"')


class GrowingArray:
    """A JSON array."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def append(self, value: object) -> None:
        if len(self._json) > 1:
            self._json += b","
        self._json += msgspec.json.encode(value)

    def encoded(self) -> msgspec.Raw:
        return msgspec.Raw(self._json + b"]")
