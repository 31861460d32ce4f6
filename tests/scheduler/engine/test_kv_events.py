"""KV events: a subscriber that knows only the format has the same tree as the cache, also after lost events."""

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from pdserve.common.errors import StartupError
from pdserve.scheduler.engine import kv_events
from pdserve.scheduler.engine.kv_events import KvEventPublisher
from tests.scheduler.engine.kv_event_subscribers import PAGE, BusyCache, Follower


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher("127.0.0.1", 0, topic="kv@pod")
    yield publisher
    publisher.close()


def follower_of(publisher: KvEventPublisher, topic: bytes = b"") -> Follower:
    return Follower(publisher.port, publisher.replay_port, topic)


def test_subscriber_agrees_with_the_cache_after_random_changes_and_a_loss(publisher: KvEventPublisher) -> None:
    """Events before the subscription, and five lost batches in the middle, are replayed."""
    busy = BusyCache(seed=1)
    busy.cache.listen(publisher.events_of(0, PAGE, "GPU"))
    changes = 0

    def change_until(done: Callable[[], bool]) -> bool:
        nonlocal changes
        for _ in range(20):
            changes += 1
            busy.change()
        return done()

    with follower_of(publisher, b"kv@") as follower:
        follower.follow(lambda: change_until(lambda: follower.next_sequence > 0))
        follower.to_lose = 5
        follower.follow(lambda: change_until(lambda: changes >= 2000 and not follower.to_lose))
        busy.cache.flush()
        busy.change()
        follower.follow(lambda: "AllBlocksCleared" in follower.kinds and follower.agrees_with(busy))
        assert follower.blocks
        for _ in range(500):
            busy.change()
        follower.follow(lambda: follower.agrees_with(busy))
        assert follower.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert (follower.media, follower.ranks) == ({"GPU"}, {0})
        assert follower.replayed > 0


def test_ranks_are_named_and_share_the_sequence(publisher: KvEventPublisher) -> None:
    for rank, medium in ((0, "GPU"), (3, "CPU")):
        busy = BusyCache(seed=rank + 10)
        busy.cache.listen(publisher.events_of(rank, PAGE, medium))
        busy.change()
    with follower_of(publisher) as follower:
        follower.follow(lambda: len(follower.ranks) == 2)
    assert (follower.ranks, follower.media) == ({0, 3}, {"GPU", "CPU"})


def test_kept_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_BATCHES", 3)
    publisher = KvEventPublisher("127.0.0.1", 0)
    monkeypatch.setattr(kv_events, "BATCH_EVENTS", 1)
    busy = BusyCache(seed=5)
    busy.cache.listen(publisher.events_of(0, PAGE, "GPU"))
    for _ in range(20):
        busy.change()
    publisher.close()
    assert publisher.published > 3
    assert [sequence for sequence, _ in publisher._kept] == list(range(publisher.published - 3, publisher.published))
    monkeypatch.setattr(kv_events, "REPLAY_BYTES", len(publisher._kept[-1][1]))
    publisher._keep(publisher.published, publisher._kept[-1][1])
    assert len(publisher._kept) == 1


def test_malformed_replay_request_is_ignored(publisher: KvEventPublisher, caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        dealer.send_multipart((b"", b"short"))
        dealer.send_multipart((b"",))
        dealer.send_multipart((b"", bytes(8)))
        assert dealer.poll(60_000)
        assert dealer.recv_multipart() == [b"", b"\xff" * 8, b""], "the answer to the third request"
    assert "malformed request" in caplog.text


def test_port_in_use_is_a_startup_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"KV events port {port} on 127.0.0.1 is in use.*--kv-events-port"):
            KvEventPublisher("127.0.0.1", port)
