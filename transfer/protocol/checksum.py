"""The checksum both sides of a transfer compute over the same tokens (`--verify-kv`).

Each (layer, plane, head) has its own XXH3-64 over the bytes of the chunk's tokens in order, seeded with its layer,
plane and head. A rank's checksum is their sum modulo 2^64. It does not depend on page sizes or on which prefill rank
wrote which part: the sums of all prefill ranks for one decode rank are added up.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import xxhash

from .layout import KvLayout

if TYPE_CHECKING:
    import torch  # schedulers, which have no tensors, add sums

MODULUS: Final = 1 << 64


def block_sum(
    planes: "Sequence[torch.Tensor]", layout: KvLayout, layers: range | None = None, heads: range | None = None
) -> int:
    """The sum over these global layers and heads of a pool (default: all it has).

    `planes` are contiguous host tensors `[layer, head, token, byte]` (uint8) of all planes, layers and heads of
    `layout`, as returned by `KvPool.read_tokens`. Raises ValueError for another shape and for tensors that need a copy.
    """
    import torch

    held = (layout.num_layers, layout.num_heads)
    if len(planes) != len(layout.planes):
        raise ValueError(f"checksum needs {len(layout.planes)} planes, got {len(planes)}")
    for rows in planes:
        if rows.device.type != "cpu" or rows.dtype != torch.uint8 or not rows.is_contiguous():
            raise ValueError(
                f"checksum needs contiguous uint8 of the host, got {rows.dtype} of {rows.device}, strides "
                f"{rows.stride()}"
            )
        if rows.ndim != 4 or rows.shape[:2] != held:
            raise ValueError(f"checksum needs [layer, head] = {list(held)}, got shape {list(rows.shape)}")
    return add_sums(
        xxhash.xxh3_64_intdigest(
            blocks[layer - layout.layer_start, head - layout.head_start].data, _seed(name, layer, head)
        )
        for name, blocks in zip(layout.kind, (rows.flatten(2).numpy() for rows in planes), strict=True)
        for layer in (layout.layers if layers is None else layers)
        for head in (layout.heads if heads is None else heads)
    )


def add_sums(sums: Iterable[int]) -> int:
    """The checksum of several blocks."""
    return sum(sums) % MODULUS


def _seed(plane: str, layer: int, head: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{plane}/{layer}/{head}".encode())
