"""The memory layout of one rank's KV pool, as sent in the handshake.

Pools are page-major: `[page][layer][plane][head][token][bytes]`. So a page is contiguous for any number of layers, a
layer range of a page is contiguous, and a head slice is one contiguous range per (layer, plane). A plane is `k`, `v`,
or one of the replicated rows of latent-attention models (`latent`, `indexer`), which have a single head. Behind indexer
keys in fp8 is a plane `indexer_scale`, of 4 bytes per token. If only some layers have an indexer, the "layers" of its
pool count only those, over the whole model.
"""

import msgspec

from ...common.arithmetic import ceil_div


class Plane(msgspec.Struct, array_like=True, frozen=True):
    """One kind of row: its name and the bytes one token takes in one head."""

    name: str
    token_bytes: int


class KvLayout(msgspec.Struct, array_like=True, frozen=True):
    """The part of the model's KV that one rank holds. Layers and heads are global, half-open ranges."""

    planes: tuple[Plane, ...]
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    page_size: int
    num_pages: int
    dtype: str
    """Of all planes but `indexer_scale`, which is float32."""

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_end)

    @property
    def heads(self) -> range:
        return range(self.head_start, self.head_end)

    @property
    def kind(self) -> tuple[str, ...]:
        """The names of the planes: pools of two servers correspond if these are equal."""
        return tuple(plane.name for plane in self.planes)

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_end - self.head_start

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.num_heads * self.page_size * sum(plane.token_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers, planes and heads of this rank."""
        return self.page_bytes // self.page_size

    @property
    def size_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def plane_offset(self, index: int) -> int:
        """The offset of plane `index` inside one layer of one page."""
        return self.num_heads * self.page_size * sum(plane.token_bytes for plane in self.planes[:index])

    def pages_for(self, tokens: int) -> int:
        """The number of pages for this many tokens."""
        return ceil_div(tokens, self.page_size)
