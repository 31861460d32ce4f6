"""A KV pool of this rank, as transfers use it: its memory and its layout."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..protocol.layout import KvLayout


class RegisteredMemory(Protocol):
    """Memory that peers read or write: a KV pool, or a staging ring (`memory/ring_memory.py`)."""

    @property
    def base_address(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def probe(self) -> torch.Tensor:
        """Bytes behind the content, registered with it, for transport probes."""

    @property
    def registered_bytes(self) -> int:
        """From `base_address` to the end of `probe`."""


class KvMemory(RegisteredMemory, Protocol):
    """A KV pool (`memory/kv_pool.py`)."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def data(self) -> torch.Tensor:
        """`[page, layer, plane, head, token, dim]`, if the pool can be staged."""

    def read_tokens(self, pages: Sequence[int], start: int, end: int) -> list[torch.Tensor]: ...

    def write_tokens(self, pages: Sequence[int], start: int, planes: Sequence[torch.Tensor]) -> None: ...


class LocalPool(NamedTuple):
    """A pool of this rank: its memory and its layout."""

    memory: KvMemory
    layout: KvLayout
