"""Reads a request body: bounded in size and time, and inflated if the client has compressed it with gzip."""

import asyncio
import zlib
from typing import Protocol

from starlette.requests import Request

from ...configs.errors import ClientError, TooLargeError
from ...configs.words import shown
from .common.fields import BodyError

BODY_TIMEOUT_S = 60.0
GZIP_FORMAT = 16 + zlib.MAX_WBITS
PIECE_BYTES = 1 << 20
"""Bytes that are inflated at once, a few milliseconds; other clients are served in between."""


class BodyTimeoutError(ClientError):
    status = 408
    code = "body_timeout"


class UnsupportedEncodingError(ClientError):
    status = 415
    code = "unsupported_encoding"


class _Decoder(Protocol):
    async def add(self, chunk: bytes, body: bytearray) -> None:
        """Append what `chunk` holds to `body`."""

    def finish(self) -> None:
        """Raise BodyError when the body is incomplete."""


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body. Enforces the limit while reading, regardless of Content-Length, and on the inflated body."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise TooLargeError(f"the body has {declared} bytes; at most {max_body_bytes} (max_body_bytes) are allowed")
    decoder = _decoder_of(request, max_body_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                await decoder.add(chunk, body)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s; got {len(body)} bytes"
        ) from None
    decoder.finish()
    return bytes(body)


def _decoder_of(request: Request, max_bytes: int) -> _Decoder:
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return _Plain(max_bytes)
    if encoding in ("gzip", "x-gzip"):
        return _Gunzip(max_bytes)
    raise UnsupportedEncodingError(f"Content-Encoding {shown(encoding)} is not supported: send gzip or no encoding")


class _Plain:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def add(self, chunk: bytes, body: bytearray) -> None:
        body += chunk
        if len(body) > self._max_bytes:
            raise TooLargeError(f"the body is over {self._max_bytes} bytes (max_body_bytes)")

    def finish(self) -> None:
        pass


class _Gunzip:
    """A body may consist of several gzip members, which follow each other."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._inflater = zlib.decompressobj(GZIP_FORMAT)
        self._began = False

    async def add(self, chunk: bytes, body: bytearray) -> None:
        full = False
        while chunk or full:
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(GZIP_FORMAT)
            self._began = True
            most = min(self._max_bytes + 1 - len(body), PIECE_BYTES)
            try:
                piece = self._inflater.decompress(chunk, most)
            except zlib.error as error:
                raise BodyError(f"the body is not valid gzip: {error}") from None
            body += piece
            if len(body) > self._max_bytes:
                raise TooLargeError(f"the inflated body is over {self._max_bytes} bytes (max_body_bytes)")
            chunk = self._inflater.unused_data if self._inflater.eof else self._inflater.unconsumed_tail
            full = len(piece) == most and not self._inflater.eof  # zlib may hold more, with all its input consumed
            if chunk or full:
                await asyncio.sleep(0)

    def finish(self) -> None:
        if self._began and not self._inflater.eof:
            raise BodyError("the body is not valid gzip: it ends too early")
