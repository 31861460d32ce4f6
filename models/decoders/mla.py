"""The forward pass of a DeepSeek-V3 decoder (V3, R1, Kimi-K2) over a paged cache: one rank's share of it.

The arithmetic is that of transformers 5.17, except that attention stays in the latent space (layers/mla.py). Prompts,
chunks and single tokens are treated alike.
"""

import torch

from ...kernels.mla.dense_mla import dense_mla
from ...kernels.mla.tile_plan import TilePlan, plan_tiles
from ...memory.kv_pool import KvCache, KvPool
from ..layers.batch import ForwardBatch
from ..layers.latent_rows import RowPlaces, latent_pages, new_token_rows
from ..layers.mla import compress, expand_head_queries
from .latent import LatentDecoder


class MlaDecoder(LatentDecoder):
    """Attends to all rows. A cache has one pool: the "latent" rows of the stage's layers, in the weights' dtype.
    Tensor-parallel ranks have the same content; with data-parallel attention, each has the rows of its own requests.
    """

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return len(self.parameters.layers[0].attention.kv_b)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's rows on this rank."""
        return len(self.parameters.layers) * self._mla.latent_dim * self.parameters.dtype.itemsize

    def make_cache(self, num_pages: int, page_size: int) -> KvCache:
        """A cache of this rank's layers."""
        layers = self.config.stage_layers(self.parameters.shard)
        pool = KvPool(
            num_pages=num_pages,
            num_layers=len(layers),
            first_layer=layers.start,
            num_heads=1,
            page_size=page_size,
            head_dim=self._mla.latent_dim,
            dtype=self.parameters.dtype,
            device=self.parameters.device,
            planes=("latent",),
        )
        return KvCache(pool)

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        *,
        hidden: torch.Tensor | None = None,
        live_rows: torch.Tensor | None = None,
        last_only: bool = False,
        plan: TilePlan | None = None,
    ) -> torch.Tensor:
        """Write the rows of all tokens into `cache`; returns the output of the stage's last layer, [T, hidden], for
        `logits` or for the next stage, which gets it as `hidden`. The first stage gets None. With `last_only`, returns
        only the `last_rows` of the batch.

        `live_rows` (on the device, one integer) is the number of valid rows of a padded batch: the others write
        nothing, and their results are undefined. `plan` is given for a batch without slices, in a CUDA graph.
        """
        (pool,) = cache.pools
        plan = plan or self._plan(batch, cache.page_size)
        new_rows = new_token_rows(batch, cache.page_size, live_rows)
        if hidden is None:
            hidden = self._vocabulary.embed(batch.token_ids)
        mla, cos_sin = self._mla, self._rotary.cos_sin(batch.positions)
        layers = self.parameters.layers
        normed = self._enter(hidden)
        for index, layer in enumerate(layers):  # like the pool, `index` counts the layers of this rank
            pages = latent_pages(pool, index)
            compressed = compress(normed, layer.attention, *cos_sin, RowPlaces(pages, new_rows), None)
            query = expand_head_queries(compressed, layer.attention, mla, *cos_sin)
            attended = dense_mla(query, pages, plan, scale=self._scale, value_dim=mla.kv_rank)
            hidden, normed = self._finish_layer(index, attended, hidden, batch, last_only=last_only)
        return hidden

    def _plan(self, batch: ForwardBatch, page_size: int) -> TilePlan:
        return plan_tiles(
            [len(piece.token_ids) for piece in batch.slices],
            [piece.end for piece in batch.slices],
            [piece.pages for piece in batch.slices],
            page_size=page_size,
            heads=self.num_heads,
            device=batch.token_ids.device,
        )
