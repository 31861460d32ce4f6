"""Damaged messages of peers, ranks and leaders. Peers may send anything: impossible counts and addresses are refused
with a reason, and a refused message allocates no page.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.ranks import (
    CancelChunks,
    CommandDone,
    CopyPage,
    LoadPages,
    OpenPeer,
    RankAlive,
    RankCommand,
    RankReady,
    RankReport,
    SavePages,
    SentStep,
)
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.scheduler.ranks.page_tables import KnownTables, SentTables, UnknownPagesError
from pdserve.transfer.plan.page_sizes import describe_page_sizes
from pdserve.transfer.plan.pairing import check_pair
from pdserve.transfer.plan.staged_regions import staged_regions
from pdserve.transfer.protocol.messages import AnyMessage, Hello, InstanceId, KvDestination, TransferFailed
from pdserve.transfer.protocol.wire import WireError, decode
from tests.fuzz.harness import altered, damaged, fuzz, kept
from tests.scheduler.ranks.test_page_tables import step_of
from tests.transfer.protocol.test_wire import EVERY_MESSAGE, HELLO, KEY, RANKS, STAGING_RANKS, WELCOME

DECODE = InstanceId("d1")
PAGES = 16
DESTINATION = KvDestination(KEY, "rid", SamplingParams(max_new_tokens=3, seed=1), 9.5, "page", 8, 0, False)
PROMPT, INDICES = list(range(24)), [3, 1, 0, 2]
STAGING_HELLO = msgspec.structs.replace(HELLO, ranks=STAGING_RANKS)


def on_the_wire(message: Any) -> Any:
    """The msgpack value of a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def readable(frame: bytes, *arrays: bytes) -> AnyMessage | None:
    try:
        return decode([frame, *arrays])[0]
    except WireError:
        return None


def test_hello_is_refused_or_usable() -> None:
    """The steps after pairing, such as planning staged copies, work with every Hello that was accepted."""

    def check(frame: bytes) -> None:
        hello = readable(frame)
        if isinstance(hello, Hello) and check_pair(hello, WELCOME) is None:
            list(staged_regions(hello, WELCOME))
            describe_page_sizes(hello, WELCOME, 512)

    assert check_pair(STAGING_HELLO, WELCOME) is None
    for frame in kept("peer_messages"):
        check(frame)
    hellos = st.sampled_from([HELLO, STAGING_HELLO])
    fuzz(hellos.flatmap(lambda hello: altered(on_the_wire(hello))).map(msgspec.msgpack.encode), check)


def test_messages_of_peers_are_read_or_refused() -> None:
    frames = [msgspec.msgpack.encode(message) for message in EVERY_MESSAGE]

    def check(frame: bytes) -> None:
        readable(frame, b"", b"")

    fuzz(
        st.sampled_from(EVERY_MESSAGE)
        .flatmap(lambda message: altered(on_the_wire(message)))
        .map(msgspec.msgpack.encode)
        | st.sampled_from(frames).flatmap(damaged),
        check,
    )


def test_destination_is_refused_or_has_valid_pages() -> None:
    valid = [on_the_wire(DESTINATION), PROMPT, INDICES]

    def check(value: Any) -> None:
        destination, prompt, indices = value if isinstance(value, list) and len(value) == 3 else (None, [], [])
        message = readable(msgspec.msgpack.encode(destination), b"", b"")
        assert repr(value) != repr(valid) or message == DESTINATION  # repr: 0 equals False, and is no bool on the wire
        if not isinstance(message, KvDestination) or message.sampling.grammar is not None:
            return
        arrays = [_int32(prompt), _int32(indices)]
        prefill = prefill_server()
        prefill.receive(PrefillRequest(DECODE, message, arrays[0], arrays[1], 0.0, []), 0.0)
        prefill.advance(0.0)
        effects = prefill.take_effects()
        refused = [
            effect.message
            for effect in effects
            if isinstance(effect, SendToPeer) and isinstance(effect.message, TransferFailed)
        ]
        if refused:
            assert value != valid
            assert refused[0].reason
            assert not prefill.requests
        else:
            assert all(0 <= index < PAGES for index in arrays[1])
            step = prefill.next_step(0.0)
            assert step is not None
        prefill.check_integrity()

    check(valid)
    fuzz(altered(valid), check)


def prefill_server() -> PrefillScheduler:
    limits = PrefillLimits(page_size=4, chunk_size=64, max_queued_requests=8, context_length=256, vocab_size=100)
    prefill = PrefillScheduler(limits, PageAllocator[KvPage](PAGES), dp_rank=0)
    prefill.peer_up(DECODE, PageSpace(PAGES, 8))
    return prefill


def _int32(numbers: Any) -> list[int]:
    """The values that arrive as an array of 32-bit integers."""
    found = numbers if isinstance(numbers, list) else [numbers]
    whole = [int(number) % 2**32 for number in found if isinstance(number, int)]
    values: list[int] = np.array(whole, dtype=np.uint32).view(np.int32).tolist()
    return values


COMMANDS: list[Any] = [
    SentTables().pack(step_of(1, [1, 2, 3], [4])),
    CopyPage(2, KvPage(1), KvPage(2), 3),
    SavePages(1, "rid", (KvPage(1), KvPage(2))),
    LoadPages(2, "rid", (KvPage(1),)),
    OpenPeer(HELLO, WELCOME),
    CancelChunks(DECODE, KEY),
]
REPORTS: list[Any] = [
    RankReady(0, RANKS[0], 100, 64, "float32", "cpu", 1, 2, 3),
    CommandDone(0, 2),
    RankAlive(1, ("a problem",), 0.5),
]


def test_commands_to_ranks_are_read_or_refused() -> None:
    """A step that extends page tables which the rank does not have is refused with UnknownPagesError."""
    decoder = msgspec.msgpack.Decoder(RankCommand)

    def check(frame: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, UnknownPagesError):
            command = decoder.decode(frame)
            if isinstance(command, SentStep):
                KnownTables().unpack(command)

    _fuzz_messages(COMMANDS, decoder, check)


def test_reports_of_ranks_are_read_or_refused() -> None:
    decoder = msgspec.msgpack.Decoder(RankReport)

    def check(frame: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            decoder.decode(frame)

    _fuzz_messages(REPORTS, decoder, check)


def _fuzz_messages(messages: list[Any], decoder: msgspec.msgpack.Decoder[Any], check: Callable[[bytes], None]) -> None:
    frames = [msgspec.msgpack.encode(message) for message in messages]
    assert [type(decoder.decode(frame)) for frame in frames] == [type(message) for message in messages]
    for frame in (*frames, *kept("rank_messages")):
        check(frame)
    fuzz(
        st.sampled_from(messages).flatmap(lambda message: altered(on_the_wire(message))).map(msgspec.msgpack.encode)
        | st.sampled_from(frames).flatmap(damaged),
        check,
    )
