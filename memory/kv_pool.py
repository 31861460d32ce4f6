"""The KV memory of one rank: page-major memory `[page][layer][plane][head][token][dim]`, and the cache it forms."""

import mmap
from collections.abc import Iterator, Sequence

import torch

from ..common.arithmetic import ceil_div
from .pinned import PinnedMemory

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.uint8: "uint8",
}

PROBE_BYTES = 1 << 10
"""Size of the probe area after the pages of a pool: peers write to it and read it back to test a transport."""

SCALE_BYTES = torch.float32.itemsize

_COPY_BYTES = 64 << 20
"""Bytes of pages that are saved or loaded per copy."""


class KvPool:
    """One contiguous memory range, allocated here or passed in, so that the pool is one registered region. The last
    `PROBE_BYTES` of the memory are `probe`.

    `planes` names what a token has per layer and head: keys and values, or one row of a latent-attention model
    ("latent", "indexer"), which has a single head. `layer(i)` gives a strided view per plane, `[page, head, token,
    dim]`, which kernels read and write. `layers` and `heads` are the ranges of the model that this rank holds; in an
    indexer pool `layers` counts only the layers that have an indexer.

    A pool may have one more plane, with one float32 scale per token and head. It follows the other planes, so that rows
    and scales are aligned and a page is contiguous. `data` is `[page, layer, plane, head, token, dim]` or, with scales,
    uint8 `[page, layer, byte]`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        num_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        planes: tuple[str, ...] = ("k", "v"),
        scale_plane: str | None = None,
        first_layer: int = 0,
        first_head: int = 0,
        pinned: bool = False,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`scale_plane` is the name of the plane of scales. `pinned` page-locks host memory for the GPU; raises
        StartupError if that fails. A given `memory` (from `zeroed`) may be shared: the pool starts at its beginning.
        """
        self.planes = planes if scale_plane is None else (*planes, scale_plane)
        self.scale_plane = scale_plane
        self.dtype = dtype
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.layers = range(first_layer, first_layer + num_layers)
        self.heads = range(first_head, first_head + num_heads)
        self.page_size = page_size
        self.head_dim = head_dim
        layer_bytes = num_heads * page_size * sum(self.plane_token_bytes)
        page_bytes = num_layers * layer_bytes
        self._pinned: PinnedMemory | None = None
        if pinned:
            assert device.type == "cpu", f"memory of {device} cannot be page-locked"
            self._pinned = PinnedMemory(num_pages * page_bytes + PROBE_BYTES, unit_bytes=page_bytes)
            memory = self._pinned.data
        elif memory is None:
            memory = zeroed(num_pages * page_bytes, device)
        assert len(memory) >= num_pages * page_bytes + PROBE_BYTES, "memory of `zeroed` has room for probes"
        self.probe = memory[-PROBE_BYTES:]
        self.registered_bytes = len(memory)
        data = memory[: num_pages * page_bytes]
        if scale_plane is None:
            shape = (num_pages, num_layers, len(planes), num_heads, page_size, head_dim)
            self.data = data.view(dtype).view(shape)
            self._layers = [self.data[:, index].unbind(1) for index in range(num_layers)]
        else:
            self.data = data.view(num_pages, num_layers, layer_bytes)
            self._layers = [self._planes_with_scales(index) for index in range(num_layers)]

    @property
    def base_address(self) -> int:
        return self.data.data_ptr()

    @property
    def size_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def page_bytes(self) -> int:
        return self.size_bytes // self.num_pages

    @property
    def on_gpu(self) -> bool:
        return self.data.device.type == "cuda"

    @property
    def pages_per_chunk(self) -> int:
        """A copy to or from a GPU must not cross a multiple of this many pages."""
        return self.num_pages if self._pinned is None else self._pinned.chunk_bytes // self.page_bytes

    @property
    def dtype_name(self) -> str:
        """The type of all planes except the plane of scales."""
        return DTYPE_NAMES[self.dtype]

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one token of one head in one plane; scales are not counted."""
        return self.head_dim * self.dtype.itemsize

    @property
    def plane_token_bytes(self) -> tuple[int, ...]:
        """Bytes of one token of one head, by plane."""
        return tuple(SCALE_BYTES if name == self.scale_plane else self.head_token_bytes for name in self.planes)

    def close(self) -> None:
        """Unregister pinned memory from the GPU; no GPU work may use it. No effect on other pools."""
        if self._pinned is not None:
            self._pinned.close()

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """A view per plane of local layer `index`, of shape [page, head, token, dim]."""
        return self._layers[index]

    def _planes_with_scales(self, index: int) -> tuple[torch.Tensor, ...]:
        *planes, scales = self._split_planes(self.data[:, index])
        return *(plane.view(self.dtype) for plane in planes), scales.view(torch.float32)

    def _split_planes(self, layers: torch.Tensor) -> list[torch.Tensor]:
        """Views `[..., head, token, byte]`, by plane, of layers `[..., byte]` (uint8)."""
        sizes = [self.num_heads * self.page_size * token_bytes for token_bytes in self.plane_token_bytes]
        return [
            plane.view(*layers.shape[:-1], self.num_heads, self.page_size, -1)
            for plane in torch.split_with_sizes(layers, sizes, dim=-1)
        ]

    def copy_page(self, source: int, destination: int, tokens: int | None = None) -> None:
        """Copy one page to another, or only its first `tokens` tokens."""
        if tokens is None:
            self.data[destination].copy_(self.data[source])
            return
        for layer in range(self.num_layers):
            for plane in self.layer(layer):
                plane[destination, :, :tokens].copy_(plane[source, :, :tokens])

    def save(self, pages: Sequence[int]) -> torch.Tensor:
        """A host copy of these pages; synchronous."""
        saved = torch.empty((len(pages), *self.data.shape[1:]), dtype=self.data.dtype)
        for start, index in self._blocks(pages):
            saved[start : start + len(index)] = self.data[index].cpu()
        return saved

    def load(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        """Copy the result of `save` into the first of these pages."""
        for start, index in self._blocks(pages[: len(saved)]):
            self.data[index] = saved[start : start + len(index)].to(self.data.device)

    def _blocks(self, pages: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Pages in blocks, each with its start. Limits the temporary device memory of a copy."""
        size = max(1, _COPY_BYTES // self.page_bytes)
        for start in range(0, len(pages), size):
            block = list(pages[start : start + size])
            yield start, torch.tensor(block, dtype=torch.long, device=self.data.device)

    def read_tokens(self, pages: Sequence[int], start: int, end: int) -> list[torch.Tensor]:
        """The bytes of tokens [start, end) of a sequence, by plane: contiguous host `[layer, head, token, byte]`.

        The result does not depend on the page size, so that both sides of a transfer can be compared.
        """
        first = start // self.page_size
        last = ceil_div(end, self.page_size)
        index = torch.tensor(pages[first:last], dtype=torch.long, device=self.data.device)
        gathered = self.data[index].flatten(2).view(torch.uint8)  # [page, layer, byte]
        offset = first * self.page_size
        return [
            plane.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, start - offset : end - offset].contiguous().cpu()
            for plane in self._split_planes(gathered)
        ]

    def write_tokens(self, pages: Sequence[int], start: int, planes: Sequence[torch.Tensor]) -> None:
        """Write the tokens of a sequence from `start` on. `planes` are as `read_tokens` returns them. Enqueued on the
        current stream.
        """
        views = self._split_planes(self.data.flatten(2).view(torch.uint8))
        end = start + planes[0].shape[2]
        for view, plane in zip(views, planes, strict=True):
            rows = plane.to(self.data.device)
            for index in range(start // self.page_size, ceil_div(end, self.page_size)):
                first = index * self.page_size
                part = slice(max(start, first) - first, min(end, first + self.page_size) - first)
                view[pages[index], :, :, part] = rows[:, :, first + part.start - start : first + part.stop - start]


class KvCache:
    """All KV of one rank: pools that share page ids. A sequence's page is that page of every pool."""

    def __init__(self, *pools: KvPool) -> None:
        assert len({(pool.num_pages, pool.page_size) for pool in pools}) == 1, "pools of one cache share their pages"
        self.pools = pools

    @property
    def num_pages(self) -> int:
        return self.pools[0].num_pages

    @property
    def page_size(self) -> int:
        return self.pools[0].page_size

    @property
    def device(self) -> torch.device:
        return self.pools[0].data.device

    @property
    def size_bytes(self) -> int:
        return sum(pool.size_bytes for pool in self.pools)

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on `device`."""
        return self.size_bytes

    def close(self) -> None:
        """Unregister pinned memory from the GPU; no GPU work may use it."""
        for pool in self.pools:
            pool.close()

    def copy_page(self, source: int, destination: int, tokens: int | None = None) -> None:
        """Copy one page to another, or only its first `tokens` tokens."""
        for pool in self.pools:
            pool.copy_page(source, destination, tokens)

    def save(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """A host copy of these pages; synchronous."""
        return [pool.save(pages) for pool in self.pools]

    def load(self, saved: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        """Copy the result of `save` into the first of these pages."""
        for pool, part in zip(self.pools, saved, strict=True):
            pool.load(part, pages)


def zeroed(size_bytes: int, device: torch.device) -> torch.Tensor:
    """`size_bytes` zeros, and PROBE_BYTES after them. Attention reads rows that were never written and masks them out;
    they must be zeros, because NaN would survive the mask of dense attention.

    Host memory comes from mmap, which zeroes it on first use; `torch.zeros` would touch all of it at start.
    """
    size_bytes += PROBE_BYTES
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
