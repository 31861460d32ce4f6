"""The reliable channel: each message once and in order over a faulty network; memory is bounded."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.transfer.control.reliable_channel import ChannelFullError, ChannelProtocolError, ReliableChannel
from pdserve.transfer.protocol.wire import Buffer, Envelope, split


def deliver(channel: ReliableChannel, frames: list[Buffer], now: float) -> bytes | None:
    """Process received frames as the control thread does. Returns the body if it is to be delivered."""
    envelope, body = split(frames)
    channel.acknowledge(envelope.ack, now)
    return bytes(body[0]) if envelope.seq and channel.accept(envelope.seq) else None


def numbers(sent: list[list[Buffer]]) -> list[int]:
    return [split(frames)[0].seq for frames in sent]


def check_integrity(channel: ReliableChannel) -> None:
    """The counters agree with each other and with what waits."""
    assert channel._first <= channel._next <= channel._first + min(channel.pending, channel.window)
    assert channel._first <= channel._highest_sent + 1 <= channel._first + channel.pending
    assert channel._waiting_bytes == sum(len(frame) for body in channel._waiting for frame in body)
    assert channel._waiting_bytes <= channel.limit_bytes
    assert channel.pending <= channel.limit_messages
    assert channel.unacknowledged_received >= 0


class LossyPair(RuleBasedStateMachine):
    """Two channels and a network that loses, repeats and reorders packets in both directions."""

    @initialize(window=st.integers(1, 5))
    def start(self, window: int) -> None:
        self.now = 0.0
        self.ends = [
            ReliableChannel(resend_after_s=1.0, window=window, limit_messages=20, limit_bytes=1000) for _ in range(2)
        ]
        self.packets: list[list[list[Buffer]]] = [[], []]  # packets[i] are on the way to end i
        self.sent: list[list[bytes]] = [[], []]  # sent[i] by end i
        self.delivered: list[list[bytes]] = [[], []]  # delivered[i] to end i

    @rule(end=st.integers(0, 1), size=st.integers(0, 80))
    def put(self, end: int, size: int) -> None:
        body = len(self.sent[end]).to_bytes(4, "big") + bytes(size)
        try:
            self.ends[end].put((body,))
        except ChannelFullError:
            channel = self.ends[end]
            assert channel.pending == 20 or channel._waiting_bytes + len(body) > 1000
        else:
            self.sent[end].append(body)

    @rule(end=st.integers(0, 1))
    def transmit(self, end: int) -> None:
        self.packets[1 - end].extend(self.ends[end].due(self.now))

    @rule(end=st.integers(0, 1))
    def heartbeat(self, end: int) -> None:
        self.packets[1 - end].append([self.ends[end].envelope(), b"heartbeat"])

    @rule(end=st.integers(0, 1), data=st.data())
    def arrive(self, end: int, data: st.DataObject) -> None:
        """Deliver any packet in flight, not only the oldest: this reorders."""
        if self.packets[end]:
            index = data.draw(st.integers(0, len(self.packets[end]) - 1))
            self.receive(end, self.packets[end].pop(index))

    @rule(end=st.integers(0, 1), data=st.data())
    def lose(self, end: int, data: st.DataObject) -> None:
        if self.packets[end]:
            del self.packets[end][data.draw(st.integers(0, len(self.packets[end]) - 1))]

    @rule(end=st.integers(0, 1), data=st.data())
    def repeat(self, end: int, data: st.DataObject) -> None:
        if self.packets[end]:
            index = data.draw(st.integers(0, len(self.packets[end]) - 1))
            self.packets[end].append(self.packets[end][index])

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(end=st.integers(0, 1))
    def pair_again(self, end: int) -> None:
        self.ends[end].restart()

    @invariant()
    def delivered_is_a_prefix_of_sent(self) -> None:
        if hasattr(self, "ends"):
            for end in range(2):
                assert self.delivered[1 - end] == self.sent[end][: len(self.delivered[1 - end])]
                check_integrity(self.ends[end])

    def teardown(self) -> None:
        """Without further faults each message arrives exactly once."""
        if not hasattr(self, "ends"):
            return
        for _ in range(60):
            for end in range(2):
                self.transmit(end)
                self.heartbeat(end)
            for end in range(2):
                for frames in self.packets[end]:
                    self.receive(end, frames)
                self.packets[end].clear()
            self.now += 0.6
        assert self.delivered[1] == self.sent[0]
        assert self.delivered[0] == self.sent[1]
        assert [channel.pending for channel in self.ends] == [0, 0]
        self.delivered_is_a_prefix_of_sent()

    def receive(self, end: int, frames: list[Buffer]) -> None:
        body = deliver(self.ends[end], frames, self.now)
        if body is not None:
            self.delivered[end].append(body)


LossyPair.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLossyPair = LossyPair.TestCase


def test_messages_arrive_in_order_although_half_of_all_packets_are_lost() -> None:
    """2,000 messages; half of all packets are lost, in both directions."""
    rng = random.Random(7)
    left, right = ReliableChannel(resend_after_s=1.0), ReliableChannel(resend_after_s=1.0)
    sent = [index.to_bytes(4, "big") for index in range(2000)]
    for body in sent:
        left.put((body,))
    delivered: list[bytes] = []
    now = 0.0
    while left.pending:
        arrived = [deliver(right, frames, now) for frames in left.due(now) if rng.random() < 0.5]
        delivered += [body for body in arrived if body is not None]
        if rng.random() < 0.5:
            deliver(left, [right.envelope(), b"heartbeat"], now)
        now += 0.4
        assert now < 10_000, "no progress"
    assert delivered == sent
    assert left.resent > 0


def test_messages_are_sent_again_only_after_the_timeout() -> None:
    channel = ReliableChannel(resend_after_s=1.0)
    channel.put((b"a",))
    assert numbers(channel.due(0.0)) == [1]
    channel.put((b"b",))
    assert numbers(channel.due(0.9)) == [2]
    assert numbers(channel.due(1.0)) == []
    assert numbers(channel.due(1.1)) == [1, 2]
    assert numbers(channel.due(2.0)) == []
    assert channel.resent == 2


def test_progress_restarts_the_timeout() -> None:
    channel = ReliableChannel(resend_after_s=1.0)
    channel.put((b"a",))
    channel.put((b"b",))
    assert numbers(channel.due(0.0)) == [1, 2]
    channel.acknowledge(1, 0.9)
    assert numbers(channel.due(1.5)) == []
    assert numbers(channel.due(2.0)) == [2]


def test_pairing_again_sends_unacknowledged_messages_again_at_once() -> None:
    channel = ReliableChannel(resend_after_s=1.0)
    channel.put((b"a",))
    assert numbers(channel.due(0.0)) == [1]
    channel.restart()
    assert numbers(channel.due(0.1)) == [1]


def test_window_bounds_the_messages_in_flight() -> None:
    channel = ReliableChannel(resend_after_s=1.0, window=2)
    for _ in range(5):
        channel.put((b"a",))
    assert numbers(channel.due(0.0)) == [1, 2]
    assert numbers(channel.due(0.1)) == []
    channel.acknowledge(1, 0.2)
    assert numbers(channel.due(0.2)) == [3]


def test_full_channel_names_the_limits_and_queues_nothing() -> None:
    channel = ReliableChannel(limit_messages=2, limit_bytes=10)
    channel.put((b"12345",))
    with pytest.raises(ChannelFullError, match=r"1 messages with 5 B .* limits are 2 messages and 10 B.* has 6 B"):
        channel.put((b"123456",))
    channel.put((b"", b"12345"))
    with pytest.raises(ChannelFullError, match="2 messages with 10 B"):
        channel.put((b"",))
    assert numbers(channel.due(0.0)) == [1, 2]
    channel.acknowledge(2, 0.0)
    channel.put((b"1234567890",))
    check_integrity(channel)


def test_acknowledging_what_was_never_sent_is_an_error() -> None:
    channel = ReliableChannel()
    channel.put((b"a",))
    with pytest.raises(ChannelProtocolError, match="message 1 was acknowledged, the last one sent was 0"):
        channel.acknowledge(1, 0.0)
    channel.due(0.0)
    channel.acknowledge(1, 0.0)
    channel.acknowledge(0, 0.0)  # late: an acknowledgement may be repeated or reordered
    assert channel.pending == 0


def test_envelopes_carry_the_acknowledgement() -> None:
    channel = ReliableChannel()
    assert [channel.accept(seq) for seq in (2, 1, 1, 3, 2)] == [False, True, False, False, True]
    assert channel.unacknowledged_received == 2
    assert channel.envelope() == Envelope(0, 2).pack()
    assert channel.unacknowledged_received == 0
