"""JSON values that only grow. Each part is encoded once; every cumulative stream event copies the encoded bytes.

In SGLang's API each event of a stream repeats the whole output so far. Encoding that again for every token would be
slow: the time would grow with the square of the length.
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
