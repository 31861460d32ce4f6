"""The header of a value in the store: its length and a checksum, so that wrong bytes are found before they are used.

The checksum is seeded with the key. So a value that is stored under the key of another one is wrong, too.
"""

import struct

import xxhash

from ...common.arithmetic import round_up

HEADER = struct.Struct("<8sQQ")
"""Magic, bytes of the payload, XXH3-64 of the payload."""
MAGIC = b"pdkv\x00\x00\x00\x01"
ALIGNMENT = 64
HEADER_BYTES = ALIGNMENT
"""The payload is aligned."""


def slot_bytes(payload_bytes: int) -> int:
    """Bytes that a value takes in the staging memory."""
    return HEADER_BYTES + round_up(payload_bytes, ALIGNMENT)


def seal(slot: memoryview, key: str, payload_bytes: int) -> int:
    """Write the header of the value that begins at `slot`; returns the bytes to store."""
    payload = slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    slot[: HEADER.size] = HEADER.pack(MAGIC, payload_bytes, _checksum(payload, key))
    slot[HEADER.size : HEADER_BYTES] = bytes(HEADER_BYTES - HEADER.size)
    return HEADER_BYTES + payload_bytes


def is_intact(slot: memoryview, key: str, payload_bytes: int) -> bool:
    """Whether the value that begins at `slot` is complete and belongs to `key`."""
    magic, length, checksum = HEADER.unpack_from(slot)
    payload = slot[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    return (magic, length) == (MAGIC, payload_bytes) and checksum == _checksum(payload, key)


def _checksum(payload: memoryview, key: str) -> int:
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(key.encode()))
