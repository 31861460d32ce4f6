"""The checksum both sides of a transfer compute over the same tokens (`--verify-kv`).

Each (layer, plane, head) has its own XXH3-64 over the bytes of the chunk's tokens in order, seeded with its layer,
plane and head. A rank's checksum is their sum modulo 2^64. It does not depend on page sizes or on which prefill rank
wrote which part: the sums of all prefill ranks for one decode rank are added up.
"""

from collections.abc import Iterable
from typing import Final

import torch
import xxhash

from .layout import KvLayout

MODULUS: Final = 1 << 64


def block_sum(rows: torch.Tensor, layout: KvLayout, layers: range | None = None, heads: range | None = None) -> int:
    """The sum over these global layers and heads of a pool (default: all it has).

    `rows` is a contiguous host tensor `[layer, plane, head, token, dim]` of all layers and heads of `layout`, as
    returned by `KvPool.read_tokens`. Raises ValueError for another shape and for tensors that need a copy.
    """
    if rows.device.type != "cpu" or not rows.is_contiguous():
        raise ValueError(f"checksum needs a contiguous host tensor, got {rows.device}, strides {rows.stride()}")
    held = (layout.num_layers, len(layout.planes), layout.num_heads)
    if rows.ndim != 5 or rows.shape[:3] != held:
        raise ValueError(f"checksum needs [layer, plane, head] = {list(held)}, got shape {list(rows.shape)}")
    blocks = rows.detach().flatten(3).view(torch.uint8).numpy()  # uint8: numpy has no bfloat16
    return add_sums(
        xxhash.xxh3_64_intdigest(
            blocks[layer - layout.layer_start, plane, head - layout.head_start].data, _seed(name, layer, head)
        )
        for layer in (layout.layers if layers is None else layers)
        for plane, name in enumerate(layout.kind)
        for head in (layout.heads if heads is None else heads)
    )


def add_sums(sums: Iterable[int]) -> int:
    """The checksum of several blocks."""
    return sum(sums) % MODULUS


def _seed(plane: str, layer: int, head: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{plane}/{layer}/{head}".encode())
