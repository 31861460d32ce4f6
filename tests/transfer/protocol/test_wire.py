"""Encoding of control messages: round trips, compatibility with older and newer peers, errors for invalid input."""

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    AnyMessage,
    CachedPrefixes,
    ChunkArrived,
    HeadSlice,
    Heartbeat,
    HeartbeatAck,
    Hello,
    InstanceId,
    KvDestination,
    Load,
    Pool,
    PrefillDone,
    Rank,
    Refused,
    StageArrived,
    StageFree,
    StageGrant,
    StagePart,
    StageRequest,
    StageRing,
    StageStopped,
    TransferFailed,
    TransferKey,
    Welcome,
)
from pdserve.transfer.protocol.wire import (
    MAX_FRAMES,
    NO_INTS,
    Envelope,
    OtherVersionError,
    WireError,
    decode,
    encode,
    split,
)

LAYOUT = KvLayout((Plane("k", 128), Plane("v", 128)), 0, 30, 0, 3, 16, 1000, "float32")
RANKS = (Rank(0, "127.0.0.1:12345", (Pool(LAYOUT, 0x7F00_0000_0000, LAYOUT.size_bytes, "host"),)),)
RING = StageRing(0x7F10_0000_0000, 1 << 20, epoch=2**62 - 1, memory="host")
STAGING_RANKS = (msgspec.structs.replace(RANKS[0], ring=RING, staging="auto"),)
KEY = TransferKey(7, 2)
PART = StagePart(RING.epoch, KEY, 3, 1, HeadSlice(0, 30, 2, 3), 512, 700)
HELLO = Hello(PROTOCOL_VERSION, InstanceId("d1"), "fp", "smollm2", RANKS, enable_hisparse=True)
WELCOME = Welcome(PROTOCOL_VERSION, InstanceId("p1"), "fp", "smollm2", STAGING_RANKS, enable_hisparse=True)
DESTINATION = KvDestination(
    KEY,
    "rid",
    SamplingParams(max_new_tokens=3, stop_token_ids=(2,)),
    9.5,
    "token",
    4,
    17,
    True,
    priority=-3,
    enable_hisparse=True,
)
EVERY_MESSAGE: list[AnyMessage] = [
    HELLO,
    WELCOME,
    Refused("mismatch", "because"),
    ChunkArrived(KEY, 0, 512, (2**64 - 1, 0)),
    PrefillDone(KEY, (TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.0))),), 512, 1, 3, 4096, 0.1, 0.2, 0.3, 128),
    TransferFailed(KEY, "reason", True, True),
    Abort(KEY, "client left"),
    AbortAck(KEY, True),
    CachedPrefixes(1, 16, 2, b"12345678", b"87654321", True),
    StageRequest(PART, 4096),
    StageGrant(PART, 1 << 40, 512),
    StageArrived(PART, 1 << 40),
    StageStopped(PART, True),
    StageFree(PART),
    Heartbeat(InstanceId("p1"), 1.5, Load(1, 2, 3)),
    HeartbeatAck(InstanceId("p1"), 1.5, Load(1, 2, 3)),
]


def fields_on_the_wire(message: AnyMessage) -> list[Any]:
    fields = msgspec.msgpack.decode(encode(message, NO_INTS, NO_INTS)[0])
    assert isinstance(fields, list)
    return fields


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_round_trip(message: AnyMessage) -> None:
    assert decode(encode(message)) == (message, ())


def test_every_message_of_the_protocol_is_covered() -> None:
    covered = {type(message) for message in EVERY_MESSAGE} | {KvDestination}
    assert covered == set(AnyMessage.__args__)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_arrays_round_trip(prompt: list[int], indices: list[int]) -> None:
    body = encode(DESTINATION, np.array(prompt, dtype=np.int32), np.array(indices, dtype=np.int32))
    message, arrays = decode([bytes(frame) for frame in body])
    assert message == DESTINATION
    assert [array.tolist() for array in arrays] == [prompt, indices]


def test_arrays_are_not_copied_on_either_side() -> None:
    prompt, indices = np.arange(1000, dtype=np.int32), np.arange(10, dtype=np.int32)
    body = encode(DESTINATION, prompt, indices)
    _, arrays = decode(body)
    assert np.shares_memory(arrays[0], prompt)
    assert np.shares_memory(arrays[1], indices)
    with pytest.raises(ValueError, match="read-only"):
        decode([bytes(frame) for frame in body])[1][0][0] = 1


def test_strided_arrays_are_made_contiguous() -> None:
    _, arrays = decode(encode(DESTINATION, np.arange(10, dtype=np.int32)[::2], NO_INTS))
    assert arrays[0].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("message", "arrays"), [(HELLO, 0), (WELCOME, 0), (DESTINATION, 2)], ids=["Hello", "Welcome", "KvDestination"]
)
class TestTrailingField:
    """`enable_hisparse` is the last field of three messages: peers without it are compatible."""

    def test_missing_trailing_field_gets_its_default(self, message: AnyMessage, arrays: int) -> None:
        fields = fields_on_the_wire(message)
        assert fields[-1] is True
        older = msgspec.msgpack.encode(fields[:-1])
        decoded, _ = decode([older, *[b""] * arrays])
        assert decoded == msgspec.structs.replace(message, enable_hisparse=False)

    def test_fields_and_arrays_that_a_newer_peer_appends_are_ignored(self, message: AnyMessage, arrays: int) -> None:
        newer = msgspec.msgpack.encode([*fields_on_the_wire(message), {"new": [1, 2]}, 3.5])
        decoded, received = decode([newer, *[b""] * arrays, b"\x01\x00\x00\x00"])
        assert decoded == message
        assert len(received) == arrays + 1

    def test_enable_hisparse_is_the_last_field(self, message: AnyMessage, arrays: int) -> None:  # noqa: ARG002
        assert msgspec.structs.fields(message)[-1].name == "enable_hisparse"
        without = fields_on_the_wire(msgspec.structs.replace(message, enable_hisparse=False))
        assert fields_on_the_wire(message) == [*without[:-1], True]


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_bytes_are_padded_to_an_array_and_round_trip(text: str) -> None:
    (_, frame) = encode(HELLO, text.encode())
    _, (received,) = decode([encode(HELLO)[0], bytes(frame)])
    assert received.tobytes().rstrip(b"\0").decode() == text


def test_fields_can_be_appended_to_nested_structs() -> None:
    fields = fields_on_the_wire(Heartbeat(InstanceId("p1"), 1.0, Load(1, 2, 3, window_tokens=4)))
    fields[3] = [1, 2]
    assert decode([msgspec.msgpack.encode(fields)])[0] == Heartbeat(InstanceId("p1"), 1.0, Load(1, 2))
    fields[3] = [1, 2, 3, True, 4, 5.0, True, "from a later version"]
    assert decode([msgspec.msgpack.encode(fields)])[0] == Heartbeat(
        InstanceId("p1"), 1.0, Load(1, 2, 3, window_tokens=4, tokens_per_s=5.0, cache_reports=True)
    )


def test_heartbeat_of_an_older_server_has_no_rdma_ports() -> None:
    message = Heartbeat(InstanceId("d1"), 1.0, Load(1), {"mlx5_0": "DOWN"})
    fields = fields_on_the_wire(message)
    assert decode([msgspec.msgpack.encode(fields)])[0] == message
    assert decode([msgspec.msgpack.encode(fields[:-1])])[0] == Heartbeat(InstanceId("d1"), 1.0, Load(1))


def test_load_of_an_older_decode_server_asks_for_no_cache_reports() -> None:
    fields = fields_on_the_wire(Heartbeat(InstanceId("d1"), 1.0, Load(1, cache_reports=True)))
    fields[3] = fields[3][:-1]
    message, _ = decode([msgspec.msgpack.encode(fields)])
    assert message == Heartbeat(InstanceId("d1"), 1.0, Load(1))


@pytest.mark.parametrize("other", [0, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("tag", ["Hello", "Welcome"])
def test_error_for_an_unreadable_hello_or_welcome_has_its_protocol_version(tag: str, other: int) -> None:
    with pytest.raises(OtherVersionError) as caught:
        decode([msgspec.msgpack.encode([tag, other, {"all": "different"}])])
    assert caught.value.version == other


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([msgspec.msgpack.encode(["Unheard", 1])], "Unheard"),
        ([msgspec.msgpack.encode(["Hello", PROTOCOL_VERSION, "d1"])], "length"),
        ([msgspec.msgpack.encode(["Hello", True, "d1"])], "unreadable"),
        ([msgspec.msgpack.encode(["Abort", [1, "two"], "r"])], "int"),
        ([msgspec.msgpack.encode(["Refused", "nonsense", "r"])], "nonsense"),
        ([msgspec.msgpack.encode({"type": "Hello"})], "array"),
        ([b""], "truncated"),
        ([b"\xc1"], "unreadable"),
        ([b"\x93\xa5Abort"], "truncated"),
        ([b"\xa2\xff\xfe"], "unreadable"),
        ([b"\x91" * 100_000], "unreadable"),
        ([encode(DESTINATION, NO_INTS, NO_INTS)[0], b""], "2 arrays, 1 received"),
        ([encode(DESTINATION, NO_INTS, NO_INTS)[0], b"", b"12345"], "5 B"),
    ],
)
def test_unreadable_message_raises_wire_error(body: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(body)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=4))
def test_any_bytes_decode_or_raise_wire_error(body: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(body)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_envelope_round_trip(seq: int, ack: int) -> None:
    envelope, body = split([Envelope(seq, ack).pack(), b"m", b"a"])
    assert (envelope, list(body)) == (Envelope(seq, ack), [b"m", b"a"])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "got 0"),
        ([bytes(16)], "got 1"),
        ([bytes(15), b""], "15 B instead of 16 B"),
        ([bytes(16), *[b""] * MAX_FRAMES], f"limit {MAX_FRAMES}"),
    ],
)
def test_invalid_envelope_raises_wire_error(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        split(frames)


def test_encode_refuses_invalid_arrays() -> None:
    with pytest.raises(WireError, match="2 arrays, 1 given"):
        encode(DESTINATION, NO_INTS)
    with pytest.raises(WireError, match="int64"):
        encode(DESTINATION, NO_INTS, np.zeros(2, dtype=np.int64))
    with pytest.raises(WireError, match="limit 67108864 B"):
        encode(DESTINATION, np.zeros((64 << 20) // 4 + 1, dtype=np.int32), NO_INTS)
