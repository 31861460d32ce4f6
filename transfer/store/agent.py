"""The store agent: a process that calls Mooncake Store for a rank, one request at a time.

    python -m pdserve.transfer.store.agent FD BYTES URL HOST        started by `channel.py`

Requests come on stdin and replies go to stdout, each as a length and msgpack. FD is staging memory that both processes
have mapped: payloads stay there, and the agent adds and checks their headers. It exits at the end of stdin.
"""

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO, Literal

import msgspec

from ...common.errors import PdserveError
from .client import MooncakeClient, StoreClient, StoreError
from .codec import HEADER_BYTES, is_intact, seal

LENGTH = struct.Struct("<I")
LOST, FOUND, CORRUPT = 0, 1, 2
"""Outcome of an item. LOST: not in the store, or not accepted. FOUND: done. CORRUPT: in the store with wrong bytes."""


class Item(msgspec.Struct, array_like=True, frozen=True):
    """A value: its key, where it begins in the staging memory and the bytes of its payload."""

    key: str
    offset: int
    payload_bytes: int


class Request(msgspec.Struct, array_like=True, frozen=True):
    """`exist` needs only the keys of its items."""

    number: int
    operation: Literal["exist", "put", "get"]
    items: tuple[Item, ...]


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of each item, or why the store cannot be used."""

    number: int
    outcomes: tuple[int, ...] = ()
    problem: str | None = None
    lost: bool = False
    """The client had connected, and its master does not answer: the agent has to be replaced. Mooncake's client mostly
    connects again, but has been seen to keep a dead connection until its process ended. It cannot be closed in this
    process: its destructor waits for the master.
    """


def perform(client: StoreClient, memory: memoryview, request: Request) -> Reply:
    """Carry out one request. `memory` is the staging memory."""
    keys = [item.key for item in request.items]
    offsets = [item.offset for item in request.items]
    try:
        match request.operation:
            case "exist":
                outcomes = [FOUND if found else LOST for found in client.exist(keys)]
            case "put":
                sizes = [seal(memory[item.offset :], item.key, item.payload_bytes) for item in request.items]
                outcomes = [FOUND if stored else LOST for stored in client.put(keys, offsets, sizes)]
            case "get":
                sizes = [HEADER_BYTES + item.payload_bytes for item in request.items]
                read = client.get(keys, offsets, sizes)
                outcomes = [
                    _judge(memory, item, size, count)
                    for item, size, count in zip(request.items, sizes, read, strict=True)
                ]
                client.remove([key for key, outcome in zip(keys, outcomes, strict=True) if outcome == CORRUPT])
    except StoreError as error:
        return Reply(request.number, problem=str(error), lost=True)
    return Reply(request.number, tuple(outcomes))


def _judge(memory: memoryview, item: Item, size: int, read: int) -> int:
    if read == 0:
        return LOST
    intact = read == size and is_intact(memory[item.offset :], item.key, item.payload_bytes)
    return FOUND if intact else CORRUPT


def serve(connect: Callable[[], StoreClient], memory: memoryview, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the end of `requests`. Connects when the first one comes, and again if that has failed."""
    decoder, encoder = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Encoder()
    client: StoreClient | None = None
    while header := requests.read(LENGTH.size):
        request = decoder.decode(requests.read(*LENGTH.unpack(header)))
        try:
            client = client or connect()
            reply = perform(client, memory, request)
        except PdserveError as error:  # no wheel, or no master
            reply = Reply(request.number, problem=str(error))
        body = encoder.encode(reply)
        try:
            replies.write(LENGTH.pack(len(body)) + body)
            replies.flush()
        except BrokenPipeError:
            return  # the rank has exited


def main() -> int:
    descriptor, size_bytes, url, host = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Mooncake may print
    shared = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    serve(lambda: MooncakeClient(url, host, address, size_bytes), memoryview(shared), sys.stdin.buffer, replies)
    os._exit(0)  # without Mooncake's destructors, which wait for the master


if __name__ == "__main__":
    sys.exit(main())
