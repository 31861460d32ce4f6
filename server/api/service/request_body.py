"""Reads a request body, with limits of size and time, and inflates it if the client has compressed it with gzip."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.requests import Request

from ....common.errors import ClientError, OverloadedError, TooLargeError
from ....common.words import shown
from ..common.fields import BodyError
from .arriving_bodies import ArrivingBodies

BODY_TIMEOUT_S = 60.0
GZIP_FORMAT = 16 + zlib.MAX_WBITS
PIECE_BYTES = 1 << 20
"""Bytes that are inflated at once, in a few milliseconds. The event loop serves other clients in between."""
MOST_MEMBERS = 1000
"""Most members of a gzip body: an empty one has 20 bytes and costs as much as kilobytes of text."""


class BodyTimeoutError(ClientError):
    status = 408
    code = "body_timeout"


class UnsupportedEncodingError(ClientError):
    status = 415
    code = "unsupported_encoding"


async def read_body(request: Request, max_body_bytes: int, arriving: ArrivingBodies) -> bytes:
    """Returns the whole body. Enforces the limit while reading, regardless of Content-Length; for a compressed body,
    the limit is that of the inflated one.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise TooLargeError(f"the body has {declared} bytes; at most {max_body_bytes} (max_body_bytes) are allowed")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        what, pieces = "body", request.stream()
    elif encoding in ("gzip", "x-gzip"):
        what, pieces = "inflated body", _inflate(_limited(request.stream(), max_body_bytes))
    else:
        raise UnsupportedEncodingError(f"Content-Encoding {shown(encoding)} is not supported: send gzip or no encoding")
    body, counted = bytearray(), None
    host = request.client.host if request.client is not None else ""
    problem: ClientError | None = None
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as timeout:
            with arriving.begin(host, timeout) as counted:
                async for piece in pieces:
                    body += piece
                    if len(body) > max_body_bytes:
                        raise TooLargeError(f"the {what} is over {max_body_bytes} bytes (max_body_bytes)")
                    arriving.grow(counted, len(body))
        return bytes(body)
    except TimeoutError:
        if counted is not None and counted.refusal is not None:
            problem = OverloadedError(counted.refusal)
        else:
            problem = BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s; got {len(body)} bytes")
    finally:  # an error has a traceback, which may keep what is here for long
        body, piece = bytearray(), b""
        await pieces.aclose()
    assert problem is not None
    raise problem


async def _limited(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yields chunks of at most `max_bytes` together. Raises TooLargeError if there are more: gzip of any size may be
    nothing when it is inflated.
    """
    received = 0
    async for chunk in chunks:
        received += len(chunk)
        if received > max_bytes:
            raise TooLargeError(f"the compressed body is over {max_bytes} bytes (max_body_bytes)")
        yield chunk


async def _inflate(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the inflated content of a gzip file, which may have several members, with zero bytes after each: some
    writers pad files with them. Raises BodyError if the file is invalid.
    """
    inflater = zlib.decompressobj(GZIP_FORMAT)
    began, members = False, 0
    async for chunk in chunks:
        if inflater.eof:
            chunk = chunk.lstrip(b"\0")
        more = bool(chunk)
        while more:
            if inflater.eof:
                inflater = zlib.decompressobj(GZIP_FORMAT)
                members += 1
                if members == MOST_MEMBERS:
                    raise BodyError(f"the body has more than {MOST_MEMBERS} gzip members")
            began = True
            try:
                piece = inflater.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise BodyError(f"the body is not valid gzip: {error}") from None
            yield piece
            chunk = inflater.unused_data.lstrip(b"\0") if inflater.eof else inflater.unconsumed_tail
            # after a full piece, zlib may hold more output although it has consumed all input
            more = bool(chunk) or (len(piece) == PIECE_BYTES and not inflater.eof)
            if more:
                await asyncio.sleep(0)
    if began and not inflater.eof:
        raise BodyError("the body is not valid gzip: it ends too early")
