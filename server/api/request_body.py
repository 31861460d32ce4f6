"""Reads a request body: bounded in size and time, and inflated if the client has compressed it with gzip."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

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


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body. Enforces the limit while reading, regardless of Content-Length, and on the inflated body."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise TooLargeError(f"the body has {declared} bytes; at most {max_body_bytes} (max_body_bytes) are allowed")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        what, pieces = "body", request.stream()
    elif encoding in ("gzip", "x-gzip"):
        what, pieces = "inflated body", _inflate(request.stream())
    else:
        raise UnsupportedEncodingError(f"Content-Encoding {shown(encoding)} is not supported: send gzip or no encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in pieces:
                body += piece
                if len(body) > max_body_bytes:
                    raise TooLargeError(f"the {what} is over {max_body_bytes} bytes (max_body_bytes)")
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s; got {len(body)} bytes"
        ) from None
    return bytes(body)


async def _inflate(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The content of a gzip file, which may consist of several members. Raises BodyError for anything else."""
    inflater = zlib.decompressobj(GZIP_FORMAT)
    began = False
    async for chunk in chunks:
        more = bool(chunk)
        while more:
            if inflater.eof:
                inflater = zlib.decompressobj(GZIP_FORMAT)
            began = True
            try:
                piece = inflater.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise BodyError(f"the body is not valid gzip: {error}") from None
            yield piece
            chunk = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            # zlib may hold more of a whole piece, with all its input consumed
            more = bool(chunk) or (len(piece) == PIECE_BYTES and not inflater.eof)
            if more:
                await asyncio.sleep(0)
    if began and not inflater.eof:
        raise BodyError("the body is not valid gzip: it ends too early")
