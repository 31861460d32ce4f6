"""Control messages as ZMQ frames: `[envelope][message][array]...`.

The envelope is two little-endian uint64, (sequence number, acknowledgement), and belongs to one transmission
(`reliable_channel.py`). The body is encoded once, also if it is sent several times: the message as msgpack, then its
integer arrays as raw little-endian int32, and its bytes, padded with zeros to a multiple of 4. All of them are received
as arrays, which are read-only views of the received frames.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...common.arithmetic import round_up
from ...common.errors import PdserveError
from .messages import PROTOCOL_VERSION, AnyMessage, KvDestination

Buffer: TypeAlias = bytes | memoryview
IntArray: TypeAlias = npt.NDArray[np.int32]
Array: TypeAlias = IntArray | bytes
Body: TypeAlias = tuple[Buffer, ...]
"""The message frame and its array frames."""

MAX_FRAME_BYTES = 64 << 20
"""Largest frame either side sends or accepts: a prompt of 16 million tokens."""
MAX_FRAMES = 16

ARRAYS_OF: dict[type[AnyMessage], int] = {KvDestination: 2}
"""The minimum number of arrays of each message: like fields they are only ever appended. Others have none."""

NO_INTS: IntArray = np.zeros(0, dtype=np.int32)

_ENVELOPE = struct.Struct("<QQ")
_WIRE_INT = np.dtype("<i4")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class WireError(PdserveError):
    """Frames that are not a message of this protocol."""


class OtherVersionError(WireError):
    """A Hello or Welcome of another protocol version that this version cannot decode."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version} is not {PROTOCOL_VERSION}")
        self.version = version


class Envelope(NamedTuple):
    """`seq` is 0 for messages without a number; `ack` is the last number received in order, 0 for none."""

    seq: int
    ack: int

    def pack(self) -> bytes:
        return _ENVELOPE.pack(self.seq, self.ack)


def encode(message: AnyMessage, *arrays: Array) -> Body:
    """The body frames of a message. They share the arrays' memory: do not write to the arrays afterwards.

    Raises WireError for too few arrays, arrays that are not int32, and frames larger than MAX_FRAME_BYTES.
    """
    needed = ARRAYS_OF.get(type(message), 0)
    if len(arrays) < needed:
        raise WireError(f"{type(message).__name__} carries {needed} arrays, {len(arrays)} given")
    frames: list[Buffer] = [_encoder.encode(message)]
    for array in arrays:
        if isinstance(array, bytes):
            frames.append(array.ljust(round_up(len(array), _WIRE_INT.itemsize), b"\0"))
            continue
        if array.ndim != 1 or array.dtype != np.int32:
            raise WireError(f"arrays are one-dimensional int32, got {array.dtype} of shape {array.shape}")
        wire = np.ascontiguousarray(array, dtype=_WIRE_INT)
        frames.append(wire.data.cast("B") if wire.size else b"")  # an empty memoryview cannot be cast
    for index, frame in enumerate(frames):
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame {index} of {type(message).__name__} has {len(frame)} B, limit {MAX_FRAME_BYTES} B")
    return tuple(frames)


def split(frames: Sequence[Buffer]) -> tuple[Envelope, Sequence[Buffer]]:
    """The envelope and the body of received frames; raises WireError."""
    if len(frames) < 2:
        raise WireError(f"an envelope and a message are 2 frames or more, got {len(frames)}")
    if len(frames) > MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, limit {MAX_FRAMES}")
    if len(frames[0]) != _ENVELOPE.size:
        raise WireError(f"the envelope has {len(frames[0])} B instead of {_ENVELOPE.size} B")
    return Envelope(*_ENVELOPE.unpack(frames[0])), frames[1:]


def decode(body: Sequence[Buffer]) -> tuple[AnyMessage, tuple[IntArray, ...]]:
    """The message and its arrays, as views of `body`; raises WireError."""
    try:
        message = _decoder.decode(body[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        version = _version_of_introduction(body[0])
        if version not in (None, PROTOCOL_VERSION):
            raise OtherVersionError(version) from error
        raise WireError(f"unreadable message: {error}") from error
    needed = ARRAYS_OF.get(type(message), 0)
    if len(body) - 1 < needed:
        raise WireError(f"{type(message).__name__} carries {needed} arrays, {len(body) - 1} received")
    arrays: list[IntArray] = []
    for index, frame in enumerate(body[1:]):
        if len(frame) % _WIRE_INT.itemsize:
            raise WireError(f"array {index} of {type(message).__name__} has {len(frame)} B, not a multiple of 4 B")
        arrays.append(np.frombuffer(frame, dtype=_WIRE_INT))
    return message, tuple(arrays)


def _version_of_introduction(frame: Buffer) -> int | None:
    """The protocol version of a Hello or Welcome of any version: it is the first field in all versions."""
    try:
        fields: Any = msgspec.msgpack.decode(frame)  # untrusted input of any type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    match fields:
        case ["Hello" | "Welcome", int(version), *_] if not isinstance(version, bool):
            return version
        case _:
            return None
