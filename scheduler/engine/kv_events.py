"""Publishes what the prefix caches of a server store and remove, in the format that vLLM, Dynamo and llm-d use.

A PUB socket sends `[topic, sequence, batch]`: the sequence counts from 0, as a big-endian 64-bit integer; the batch is
msgpack, `[time, [event, ...], dp_rank]`. A subscriber that has missed batches sends the first missing sequence to the
ROUTER socket on the next port, as `["", sequence]`, and gets `["", sequence, batch]` for this and all later ones that
are still kept, then `["", -1, ""]`.

The engine loop only appends to a queue. A thread encodes and sends the events within FLUSH_S.
"""

import collections
import logging
import threading
import time
from typing import Any

import msgspec
import zmq

from ...configs.errors import StartupError
from ...memory.page_hashes import ROOT, short_hash
from ...transfer.control.bind import bind_tcp

log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""Longest time between a change and its batch."""
BATCH_EVENTS = 512
REPLAY_BATCHES = 10_000
REPLAY_BYTES = 256 << 20
"""The newest batches are kept for subscribers that have missed some: up to this number, and this many bytes."""
SEND_QUEUE = 100_000
"""Most batches that wait for a slow subscriber. It misses further ones, and can request them from the replay port."""
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
    """Owns the two sockets and the thread. Raises StartupError if a port is taken; port 0 is any free one."""

    def __init__(self, host: str, port: int, topic: str = "") -> None:
        self._topic = topic.encode()
        self._queue: collections.deque[tuple[int, _Event]] = collections.deque()
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._kept_bytes = 0
        self.published = 0
        """Batches that were sent: the sequence of the next one."""
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._publisher.set_hwm(SEND_QUEUE)
        self._replay.set_hwm(REPLAY_BATCHES + 1)
        try:
            self.port = bind_tcp(self._publisher, host, port, "KV events port", "--kv-events-port")
            self.replay_port = bind_tcp(
                self._replay, host, port and port + 1, "replay port of KV events", "--kv-events-port"
            )
        except StartupError:
            self._context.destroy(linger=0)
            raise
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
        self._context.destroy(linger=200)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._replay.poll(int(FLUSH_S * 1000)):
                    self._answer_replay()
                self._publish()
            except Exception:
                log.exception("error while publishing KV events")
                time.sleep(FLUSH_S)
        self._publish()

    def _publish(self) -> None:
        """Send the queued events, in batches of one data-parallel rank each."""
        while self._queue:
            rank, event = self._queue.popleft()
            batch = [_on_the_wire(event)]
            while self._queue and len(batch) < BATCH_EVENTS and self._queue[0][0] == rank:
                event = _on_the_wire(self._queue.popleft()[1])
                if event[0] == batch[-1][0] == "BlockRemoved" and event[2:] == batch[-1][2:]:
                    batch[-1][1] += event[1]
                else:
                    batch.append(event)
            payload = self._encoder.encode((time.time(), batch, rank))
            sequence = self.published
            self._keep(sequence, payload)
            self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
            self.published += 1

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_replay(self) -> None:
        """Send the kept batches from a sequence on. A malformed request is ignored."""
        frames = self._replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("malformed request for a replay of KV events: %d frames", len(frames))
            return
        client, _, start = frames
        first = int.from_bytes(start, "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", END, b""))


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
