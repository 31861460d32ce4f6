"""Publishes what the prefix caches of a server store and remove, in the format that vLLM, Dynamo and llm-d use.

A PUB socket sends `[topic, sequence, batch]`: the sequence counts from 0, as a big-endian 64-bit integer; the batch is
msgpack, `[time, [event, ...], dp_rank]`. A subscriber that has missed batches sends the first missing sequence to the
ROUTER socket on the next port, as `["", sequence]`, and gets `["", sequence, batch]` for this and all later ones that
are still kept, then `["", -1, ""]`.

The engine loop only appends to a queue. A thread encodes and sends the events within FLUSH_S. Clients of both ports
share the batches that are kept for replays: a slow subscriber gets from them what it could not take before.
"""

import collections
import logging
import selectors
import threading
import time
from typing import Any

import msgspec

from ...common.errors import StartupError
from ...common.logs import rate_limited
from ...memory.page_hashes import ROOT, short_hash
from ...transfer.protocol.zmtp import MORE, frame_head
from .zmtp_port import ZmtpClient, ZmtpPort

log = logging.getLogger(__name__)
_noise = rate_limited(log)

FLUSH_S = 0.02
"""Longest time between a change and its batch."""
BATCH_EVENTS = 512
BATCH_TOKENS = 1 << 16
"""A batch ends with the event that brings it to either number."""
REPLAY_BATCHES = 10_000
REPLAY_BYTES = 256 << 20
"""The newest batches are kept for subscribers that have missed some: up to this number, and this many bytes."""
CPU_SHARE = 0.25
"""Of one core, most that clients can cost: the thread sleeps after each turn, in proportion to what they took. The
engine loop is in the same process.
"""
MAX_CONNECTIONS = 1024
"""Of each port."""
MOST_PAUSE_S = 0.25
CHECK_S = 1.0
"""How often silent clients are looked for."""
LAST_MESSAGES_S = 0.2
"""How long close() waits for subscribers to take what is published last."""
END = (-1).to_bytes(8, "big", signed=True)
MEDIUM_DEVICE = "GPU"
MEDIUM_HOST = "CPU"
MEDIUM_STORE = "EXTERNAL"
"""The KV store. vLLM's name for such memory, STORAGE, is not used: older routers would treat it as GPU memory."""

_Event = list[Any]  # msgpack arrays of several types


class CacheEvents:
    """Queues the events of one prefix cache, or of the blocks that the server has put into the KV store. A listener
    (memory/prefix_cache.py, store/stored_blocks.py), called on the engine loop's thread.
    """

    def __init__(
        self, queue: "collections.deque[tuple[int, _Event]]", dp_rank: int, page_size: int, medium: str
    ) -> None:
        self._queue = queue
        self._dp_rank = dp_rank
        self._page_size = page_size
        self._medium = medium

    def stored(self, parent: bytes, first: int, hashes: list[bytes], tokens: list[tuple[int, ...]]) -> None:  # noqa: ARG002
        self._queue.append(
            (self._dp_rank, ["BlockStored", hashes, parent, tokens, self._page_size, None, self._medium])
        )

    def removed(self, pages: list[bytes]) -> None:
        self._queue.append((self._dp_rank, ["BlockRemoved", pages, self._medium]))

    def cleared(self) -> None:
        self._queue.append((self._dp_rank, ["AllBlocksCleared"]))


class KvEventPublisher:
    """Owns the two ports and the thread. Raises StartupError if a port is taken; port 0 is any free one."""

    def __init__(self, host: str, port: int, topic: str = "", *, max_connections: int = MAX_CONNECTIONS) -> None:
        """Each port has at most so many connections."""
        self._topic = topic.encode()
        self._queue: collections.deque[tuple[int, _Event]] = collections.deque()
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._kept_bytes = 0
        self.published = 0
        """Batches that were sent: the sequence of the next one."""
        self._encoder = msgspec.msgpack.Encoder()
        self._selector = selectors.DefaultSelector()
        self._checked_at = time.monotonic()
        flag, name = "--kv-events-port", "replay port of KV events"
        self._events = ZmtpPort(
            *(self._selector, (host, port), "KV events port", flag, "PUB", max_connections),
            received=self._subscribe,
            following=self._next_event,
        )
        try:
            self._replays = ZmtpPort(
                *(self._selector, (host, port and port + 1), name, flag, "ROUTER", max_connections),
                received=self._request_replay,
                following=self._next_of_replay,
            )
        except StartupError:
            self._events.close()
            raise
        self.port, self.replay_port = self._events.port, self._replays.port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        log.info("KV events at %s:%d, replay at port %d", host, self.port, self.replay_port)

    def events_of(self, dp_rank: int, page_size: int, medium: str) -> CacheEvents:
        """The listener for a prefix cache."""
        return CacheEvents(self._queue, dp_rank, page_size, medium)

    def close(self) -> None:
        """Publish what is queued, then end the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                spent_s = self._turn(FLUSH_S)
            except Exception:
                log.exception("error while publishing KV events")
                spent_s = MOST_PAUSE_S
            self._stopping.wait(min(MOST_PAUSE_S, spent_s * (1 / CPU_SHARE - 1)))
        self._turn(0.0)
        ends_at = time.monotonic() + LAST_MESSAGES_S
        while self._events.is_sending() and time.monotonic() < ends_at:
            self._turn(FLUSH_S)
        self._events.close()
        self._replays.close()
        self._selector.close()

    def _turn(self, timeout_s: float) -> float:
        """Serve the clients and publish what is queued. Returns the CPU time that the clients took."""
        began = time.thread_time()
        for key, events in self._selector.select(timeout_s):
            key.data(events)
        if time.monotonic() > self._checked_at + CHECK_S:
            self._checked_at = time.monotonic()
            for port in (self._events, self._replays):
                port.close_silent(self._checked_at)
        spent_s = time.thread_time() - began
        if self._queue:
            self._publish()
            began = time.thread_time()
            self._events.send_all()
            spent_s += time.thread_time() - began
        return spent_s

    def _publish(self) -> None:
        """Make batches of the queued events, of one data-parallel rank each."""
        while self._queue:
            rank, event = self._queue.popleft()
            batch = [_on_the_wire(event)]
            tokens = _tokens(batch[0])
            while self._queue and len(batch) < BATCH_EVENTS and tokens < BATCH_TOKENS and self._queue[0][0] == rank:
                event = _on_the_wire(self._queue.popleft()[1])
                tokens += _tokens(event)
                if event[0] == batch[-1][0] == "BlockRemoved" and event[2:] == batch[-1][2:]:
                    batch[-1][1] += event[1]
                else:
                    batch.append(event)
            payload = self._encoder.encode((time.time(), batch, rank))
            self._keep(self.published, payload)
            self.published += 1

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _subscribe(self, client: ZmtpClient, frames: list[bytes]) -> None:
        """A subscription to a prefix of topics, or its end. Others than those are ignored."""
        (first, *_) = frames
        if self._topic.startswith(first[1:]) and first[:1] in (b"\0", b"\1"):
            client.subscriptions = max(0, client.subscriptions + (1 if first[:1] == b"\1" else -1))
        if not client.subscriptions:
            client.next_batch = None
        elif client.next_batch is None:
            client.next_batch = self.published

    def _next_event(self, client: ZmtpClient) -> list[bytes]:
        return self._next_batch(client, self._topic)

    def _request_replay(self, client: ZmtpClient, frames: list[bytes]) -> None:
        """A request for the kept batches from a sequence on. A malformed one is ignored."""
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            _noise.warning("malformed request for a replay of KV events: %d frames", len(frames))
            return
        client.next_batch = int.from_bytes(frames[1], "big")

    def _next_of_replay(self, client: ZmtpClient) -> list[bytes]:
        if client.next_batch is None:
            return []
        if pieces := self._next_batch(client, b""):
            return pieces
        client.next_batch = None
        return [_heads(b"", END, 0)]

    def _next_batch(self, client: ZmtpClient, first_frame: bytes) -> list[bytes]:
        """The message of the next batch for this client, and its new place; empty after the last batch."""
        if client.next_batch is None or client.next_batch >= self.published or not self._kept:
            return []
        oldest = self._kept[0][0]
        sequence, payload = self._kept[max(0, client.next_batch - oldest)]
        client.next_batch = sequence + 1
        return [_heads(first_frame, sequence.to_bytes(8, "big"), len(payload)), payload]


def _heads(first_frame: bytes, sequence: bytes, payload_bytes: int) -> bytes:
    """A message up to the content of its third frame."""
    first = frame_head(len(first_frame), MORE) + first_frame
    return first + frame_head(len(sequence), MORE) + sequence + frame_head(payload_bytes)


def _tokens(event: _Event) -> int:
    return len(event[3]) if event[0] == "BlockStored" else 0


def _on_the_wire(event: _Event) -> _Event:
    """Convert an event to its published form, with short hashes and one flat list of tokens."""
    match event:
        case ["BlockStored", hashes, parent, tokens, *rest]:
            above = None if parent == ROOT else short_hash(parent)
            return ["BlockStored", [*map(short_hash, hashes)], above, [one for page in tokens for one in page], *rest]
        case ["BlockRemoved", pages, medium]:
            return ["BlockRemoved", [*map(short_hash, pages)], medium]
        case _:
            return event
