"""An in-memory replacement of Mooncake Store and its client."""

import time
from collections.abc import Callable, Sequence

import torch

from pdserve.transfer.store.agent import Item, Request, perform
from pdserve.transfer.store.channel import NoReplyError
from pdserve.transfer.store.client import StoreError


class FakeStore:
    """Values by key, shared by any number of clients."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.most_values = 1 << 30
        self.dead = False
        self.read_hook: Callable[[str, bytes], bytes] = lambda _key, value: value
        """Changes what a client reads."""
        self.calls: list[str] = []


class FakeClient:
    """A client of the store, with the staging memory `memory`."""

    def __init__(self, store: FakeStore, memory: memoryview) -> None:
        self._store = store
        self._memory = memory

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._check("exist")
        return [key in self._store.values for key in keys]

    def put(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        self._check("put")
        return [self._put(*value) for value in zip(keys, offsets, sizes, strict=True)]

    def _put(self, key: str, offset: int, size: int) -> bool:
        """As in Mooncake, the first value of a key stays."""
        if len(self._store.values) >= self._store.most_values:
            return False
        self._store.values.setdefault(key, bytes(self._memory[offset : offset + size]))
        return True

    def get(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self._check("get")
        counts = []
        for key, offset, size in zip(keys, offsets, sizes, strict=True):
            value = self._store.values.get(key, b"")
            if value:
                value = self._store.read_hook(key, value)[:size]
                self._memory[offset : offset + len(value)] = value
            counts.append(len(value))
        return counts

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.values.pop(key, None)

    def _check(self, call: str) -> None:
        self._store.calls.append(call)
        if self._store.dead:
            raise StoreError("the master of the store does not answer")


class FakeChannel:
    """A channel to the store in this process. With `silent`, requests get no reply before their deadline."""

    def __init__(self, store: FakeStore, size_bytes: int) -> None:
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8)
        self._view = memoryview(self.memory.numpy().data)
        self._client = FakeClient(store, self._view)
        self.silent = False
        self.busy_for_s = 0.0

    def call(self, operation: str, items: Sequence[Item], deadline: float) -> tuple[int, ...]:
        if self.silent:
            time.sleep(max(0.0, deadline - time.monotonic()))
        if self.silent or time.monotonic() >= deadline:
            raise NoReplyError("the store has not answered")
        reply = perform(self._client, self._view, Request(1, operation, tuple(items)))  # type: ignore[arg-type]
        if reply.problem is not None:
            raise StoreError(reply.problem)
        return reply.outcomes

    def busy_s(self) -> float:
        return self.busy_for_s

    def close(self) -> None:
        pass
