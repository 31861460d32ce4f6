"""NVIDIA Dynamo's KV indexer follows our KV events: `make test-dynamo`, which installs ai-dynamo-runtime."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from pdserve.scheduler.engine.kv_events import KvEventPublisher
from pdserve.scheduler.store import stored_blocks
from tests.scheduler.engine.kv_event_subscribers import BLOCK, PAGE, StoringCache

pytestmark = pytest.mark.skipif("DYNAMO_INDEXER" not in os.environ, reason="make test-dynamo sets DYNAMO_INDEXER")

OPERATIONS = 10_000
WORKER = 7


class LossyProxy:
    """Forwards KV events, and drops the next `to_lose` of them."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._forwarded = self._context.socket(zmq.PUB)
        self.port = self._forwarded.bind_to_random_port("tcp://127.0.0.1")
        self.to_lose = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._events.poll(20):
                frames = self._events.recv_multipart()
                if self.to_lose:
                    self.to_lose -= 1
                else:
                    self._forwarded.send_multipart(frames)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Indexer:
    """A running `python -m dynamo.indexer`."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)]
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()

    def register(self, port: int, replay_port: int) -> None:
        body = {
            "instance_id": WORKER,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
            "model_name": "m",
            "block_size": PAGE,
            "dp_rank": 0,
        }
        wait_until(lambda: self._post("/register", body) is not None, "the indexer does not start")

    def cached_tokens(self, tokens: tuple[int, ...]) -> int:
        """Tokens of the longest prefix that the worker has on its GPU; 0 before its first event."""
        return self.found(tokens)[0]

    def found(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Tokens of the longest prefix on the GPU, and on the GPU and in the store."""
        found = self._post("/query", {"model_name": "m", "token_ids": list(tokens)})
        if found is None:
            return 0, 0
        on_gpu = int(found["scores"].get(str(WORKER), {}).get("0", 0))
        return on_gpu, int(found["instances"].get(str(WORKER), {}).get("longest_matched", 0))

    def _post(self, path: str, body: dict[str, Any]) -> Any:  # JSON
        with contextlib.suppress(httpx.TransportError):
            response = self._client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            if response.is_success:
                return response.json()
        return None


def wait_until(condition: Any, problem: str) -> None:  # any callable
    ends_at = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends_at, problem
        time.sleep(0.05)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    indexer = Indexer(tmp_path / "indexer.log")
    yield indexer
    indexer.close()


def test_indexer_agrees_with_cache_and_store_after_lost_events_are_replayed(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = KvEventPublisher("127.0.0.1", 0)
    proxy = LossyProxy(publisher.port)
    monkeypatch.setattr(stored_blocks, "BLOCK_TOKENS", BLOCK)
    busy = StoringCache(seed=3, events=publisher.events_of(0, PAGE, "EXTERNAL"))
    busy.cache.listen(publisher.events_of(0, PAGE, "GPU"))
    try:
        indexer.register(proxy.port, publisher.replay_port)

        def sees_changes() -> bool:
            busy.change()
            return bool(indexer.cached_tokens(busy.sequences[-1]))

        wait_until(sees_changes, "the indexer gets no events")
        for operation in range(OPERATIONS):
            busy.change()
            if operation in (OPERATIONS // 3, OPERATIONS // 2):
                proxy.to_lose = 5
            if operation % 50 == 0:
                time.sleep(0.02)  # many batches instead of one
        assert not proxy.to_lose
        sample = busy.sequences[-2000:]

        def differences() -> int:
            expected = ((busy.cached_tokens(tokens), busy.longest(tokens)) for tokens in sample)
            return sum(indexer.found(tokens) != found for tokens, found in zip(sample, expected, strict=True))

        wait_until(lambda: indexer.cached_tokens(busy.sequences[-1]) == busy.cached_tokens(busy.sequences[-1]), "late")
        wait_until(lambda: differences() == 0, f"{differences()} of {len(sample)} sequences differ")
        assert any(0 < busy.cached_tokens(tokens) < len(tokens) for tokens in sample), "nothing was evicted"
        stored = sum(busy.cached_tokens(tokens) < busy.longest(tokens) for tokens in sample)
        assert stored > 10
        assert indexer.log.read_text().count("Gap detected") >= 2
        print(f"{len(sample)} sequences agree, {stored} longer in the store; {publisher.published} batches")
    finally:
        proxy.close()
        publisher.close()
