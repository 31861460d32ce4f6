"""Random KV of a small model for transfer tests, and pools with the part that a rank holds."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.memory.kv_pool import KvPool
from pdserve.transfer.data.local_pool import LocalPool
from pdserve.transfer.protocol.layout import KvLayout, Plane

DIM = 8
Span = tuple[int, int]


def layout(
    layers: Span, heads: Span, *, page_size: int, num_pages: int, planes: Sequence[str] = ("k", "v"), dim: int = DIM
) -> KvLayout:
    return KvLayout(tuple(Plane(name, 4 * dim) for name in planes), *layers, *heads, page_size, num_pages, "float32")


def kv_of(layers: int, heads: int, tokens: int, *, seed: int, planes: int = 2) -> torch.Tensor:
    """All KV of a prompt: `[layer, plane, head, token, dim]`."""
    return torch.randn(layers, planes, heads, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def planes_of(cells: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of `cells` (see `kv_of`) by plane, as `KvPool.read_tokens` returns them."""
    return [plane.contiguous().view(torch.uint8) for plane in cells.unbind(1)]


def empty_pool(kv: KvLayout) -> KvPool:
    return KvPool(
        num_pages=kv.num_pages,
        num_layers=kv.num_layers,
        num_heads=kv.num_heads,
        page_size=kv.page_size,
        head_dim=kv.planes[0].token_bytes // 4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        planes=kv.kind,
    )


def filled_pool(kv: KvLayout, cells: torch.Tensor, pages: Sequence[int]) -> LocalPool:
    """A pool with this rank's part of `cells` in these pages, and noise everywhere else."""
    pool = empty_pool(kv)
    pool.data.normal_(generator=torch.Generator().manual_seed(99))
    put(pool, kv, cells, pages, 0, cells.shape[3])
    return LocalPool(pool, kv)


def put(pool: KvPool, kv: KvLayout, cells: torch.Tensor, pages: Sequence[int], start: int, end: int) -> None:
    """Store tokens [start, end) of `cells` in these pages: the layers and heads of the layout `kv`."""
    held = cells[kv.layer_start : kv.layer_end, :, kv.head_start : kv.head_end]
    for token in range(start, end):
        pool.data[pages[token // kv.page_size], :, :, :, token % kv.page_size] = held[:, :, :, token]


def view_of(memory: NDArray[np.uint8], kv: KvLayout) -> KvPool:
    """A pool with a copy of the memory of a receiver."""
    pool = empty_pool(kv)
    pool.data.view(torch.uint8).flatten().copy_(torch.from_numpy(np.array(memory[: kv.size_bytes])))
    return pool
