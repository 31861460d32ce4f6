"""What clients of KV events can cost: connected and mute, asking and not reading, asking again and again."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from pdserve.scheduler.engine import kv_events, zmtp_port
from pdserve.scheduler.engine.kv_events import CPU_SHARE, KvEventPublisher
from pdserve.transfer.protocol.zmtp import GREETING, frame_head
from tests.scheduler.engine.zmtp_clients import ask, connect, is_closed, replay_client, shaken, subscriber

SILENT = 200
BATCHES = 1000
PAGE = 16
PAGES = 300
"""Of the event in each batch: about 16 KB."""


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvEventPublisher]:
    monkeypatch.setattr(kv_events, "BATCH_EVENTS", 1)
    publisher = KvEventPublisher("127.0.0.1", 0)
    yield publisher
    publisher.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def publish(publisher: KvEventPublisher, batches: int, pages: int = PAGES) -> None:
    """Publish batches of one event each."""
    events = publisher.events_of(0, PAGE, "GPU")
    tokens = [tuple(range(1000, 1000 + PAGE))] * pages
    until = publisher.published + batches
    for _ in range(batches):
        events.stored(bytes(32), 0, [bytes(32)] * pages, tokens)
    wait_until(lambda: publisher.published == until)


def wait_until(condition: Callable[[], bool], patience_s: float = 60) -> None:
    ends_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.002)


def rss_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def cpu_s(publisher: KvEventPublisher) -> float:
    """CPU time of the publisher's thread."""
    assert publisher._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(publisher._thread.ident))


def replayed(publisher: KvEventPublisher) -> int:
    """How many batches a client of libzmq gets."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
        dealer.send_multipart((b"", bytes(8)))
        batches = 0
        while True:
            assert dealer.poll(30_000)
            _, _, payload = dealer.recv_multipart()
            if not payload:
                return batches
            batches += 1


@pytest.mark.parametrize("kind", ["mute", "shaken", "subscribed", "asked"])
def test_silent_clients_cost_little_and_others_are_served(
    publisher: KvEventPublisher, stack: ExitStack, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With libzmq's queues, 100 clients that had asked cost 1.2 GB."""
    monkeypatch.setattr(kv_events, "REPLAY_BATCHES", BATCHES)
    publish(publisher, BATCHES)
    replayed(publisher)  # the buffers of this client are counted before
    before = rss_mib()
    clients: dict[str, Callable[[], object]] = {
        "mute": lambda: connect(publisher.replay_port),
        "shaken": lambda: shaken(publisher.port, "SUB"),
        "subscribed": lambda: subscriber(publisher.port),
        "asked": lambda: replay_client(publisher.replay_port),
    }
    for _ in range(SILENT):
        stack.callback(clients[kind]().close)  # type: ignore[attr-defined]  # a socket
    publish(publisher, BATCHES)  # also what they get is not in the kept batches any more
    began = time.monotonic()
    assert replayed(publisher) == BATCHES
    took_s = time.monotonic() - began
    print(f"{kind}: {rss_mib() - before:.1f} MiB, {BATCHES} batches replayed in {took_s:.2f} s")
    assert took_s < 5
    assert rss_mib() - before < 50
    idle_from, began = cpu_s(publisher), time.monotonic()
    time.sleep(1)
    assert cpu_s(publisher) - idle_from < 0.02 * (time.monotonic() - began)


def test_client_that_asks_again_and_again_gets_a_share_of_a_core(publisher: KvEventPublisher, stack: ExitStack) -> None:
    publish(publisher, 2000, pages=1)
    client = stack.enter_context(shaken(publisher.replay_port, "DEALER"))
    ask(client, times=20)
    stopping = threading.Event()

    def read() -> None:
        client.settimeout(0.1)
        while not stopping.is_set():
            ask(client)
            with suppress(TimeoutError):
                client.recv(1 << 20)

    reader = threading.Thread(target=read)
    reader.start()
    used_s, began = cpu_s(publisher), time.monotonic()
    time.sleep(2)
    share = (cpu_s(publisher) - used_s) / (time.monotonic() - began)
    stopping.set()
    reader.join()
    print(f"{100 * share:.0f}% of a core")
    assert 0 < share < 1.2 * CPU_SHARE


def test_slow_subscriber_gets_the_batches_that_are_kept(publisher: KvEventPublisher, stack: ExitStack) -> None:
    """With libzmq's queues, it missed those beyond a limit."""
    context = stack.enter_context(zmq.Context())
    slow = stack.enter_context(context.socket(zmq.SUB))
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.setsockopt(zmq.SUBSCRIBE, b"")
    slow.connect(f"tcp://127.0.0.1:{publisher.port}")
    wait_until(lambda: any(one.subscriptions for one in publisher._events._clients.values()))
    publish(publisher, 200)
    for sequence in range(200):
        assert slow.poll(10_000)
        assert int.from_bytes(slow.recv_multipart()[1], "big") == sequence


def test_subscriptions_choose_by_topic_and_can_end(stack: ExitStack) -> None:
    publisher = KvEventPublisher("127.0.0.1", 0, topic="kv@pod")
    stack.callback(publisher.close)
    context = stack.enter_context(zmq.Context())
    sockets = {topic: stack.enter_context(context.socket(zmq.SUB)) for topic in (b"kv@", b"other", b"kv@pod")}
    for topic, subscribed in sockets.items():
        subscribed.setsockopt(zmq.SUBSCRIBE, topic)
        subscribed.connect(f"tcp://127.0.0.1:{publisher.port}")

    def subscriptions() -> int:
        return sum(one.subscriptions for one in publisher._events._clients.values())

    wait_until(lambda: subscriptions() == 2)
    sockets[b"kv@pod"].setsockopt(zmq.UNSUBSCRIBE, b"kv@pod")
    wait_until(lambda: subscriptions() == 1)
    publish(publisher, 1)
    assert sockets[b"kv@"].poll(10_000)
    assert sockets[b"kv@"].recv_multipart()[0] == b"kv@pod"
    assert not sockets[b"other"].poll(100)
    assert not sockets[b"kv@pod"].poll(100)


def test_heartbeats_of_libzmq_are_answered(publisher: KvEventPublisher, stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    subscribed = stack.enter_context(context.socket(zmq.SUB))
    monitor = stack.enter_context(subscribed.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT):
        subscribed.setsockopt(option, 200)
    subscribed.setsockopt(zmq.SUBSCRIBE, b"")
    subscribed.connect(f"tcp://127.0.0.1:{publisher.port}")
    assert not monitor.poll(1500)
    publish(publisher, 1)
    assert subscribed.poll(10_000)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING[:10] + b"\x01\x00",
        GREETING.replace(b"NULL", b"PLAIN"[:4]),
        GREETING + frame_head(1) + b"x",
        GREETING + b"\x02" + (1 << 40).to_bytes(8, "big"),
        GREETING + (b"\x04\x06\x05READY") + b"\x01\x01x" * 3000,
    ],
    ids=["HTTP", "ZMTP 1", "mechanism", "no handshake", "long frame", "many parts"],
)
def test_clients_of_other_protocols_are_disconnected(
    publisher: KvEventPublisher, stack: ExitStack, sent: bytes
) -> None:
    client = stack.enter_context(connect(publisher.port))
    client.sendall(sent)
    assert is_closed(client, 10)
    assert replayed(publisher) == 0


def test_clients_that_stay_silent_are_disconnected(
    publisher: KvEventPublisher, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp_port, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(zmtp_port, "PATIENCE_S", 2.0)
    publish(publisher, 100)
    mute, idle = (stack.enter_context(make) for make in (connect(publisher.port), subscriber(publisher.port)))
    asked = stack.enter_context(replay_client(publisher.replay_port))
    assert is_closed(mute, 10)
    wait_until(lambda: not publisher._replays._clients)
    assert is_closed(asked, 10)
    assert not is_closed(idle, 3), "no message waits for it"


def test_full_port_closes_the_idle_connection_of_the_host_that_has_most(stack: ExitStack) -> None:
    publisher = KvEventPublisher("127.0.0.1", 0, max_connections=8)
    stack.callback(publisher.close)
    other = stack.enter_context(shaken(publisher.port, "SUB", host="127.0.0.2"))
    many = []
    for number in range(20):
        many.append(stack.enter_context(shaken(publisher.port, "SUB")))
        wait_until(lambda number=number: len(publisher._events._clients) == min(8, number + 2))  # type: ignore[misc]
    assert [is_closed(one, 0.2) for one in many] == [True] * 13 + [False] * 7
    assert not is_closed(other, 0.1)
