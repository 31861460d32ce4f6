"""The forward pass of a DeepSeek-V3.2 or GLM DSA decoder over a paged cache: one rank's share of it.

The arithmetic is that of transformers 5.17, except that attention stays in the latent space (mla.py) and reads only
selected rows. Prompts, chunks and single tokens are treated alike: every token has its own selection among the tokens
up to itself.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from ...common.errors import StartupError
from ...kernels.backends.streams import Beside, beside_if_few
from ...kernels.dsa.fp8_rows import FP8
from ...kernels.dsa.index_plan import IndexPlan, IndexScales
from ...kernels.dsa.index_topk import index_topk
from ...kernels.dsa.key_write import KeyWrite
from ...kernels.dsa.packed_rows import packed_bytes, sparse_mla_packed
from ...kernels.dsa.sparse_mla import sparse_mla
from ...kernels.hisparse.slot_tables import KvRows
from ...memory.hisparse.cache import HiSparseCache
from ...memory.hisparse.shared_pool import PoolOverlay
from ...memory.kv_pool import SCALE_BYTES, KvCache, KvPool, zeroed
from ..config.sharding import Shard
from ..layers.batch import ForwardBatch
from ..layers.hot_rows import HotLatentRows, all_resident
from ..layers.indexer import IndexerParameters, index_weights
from ..layers.latent_rows import LatentRows, PagedLatentRows, new_token_rows
from ..layers.mla import compress, expand_head_queries, expand_index_queries
from ..layers.parallel import ALONE, Parallel
from ..layers.unpacked_pages import PackedFormat
from .latent import LatentDecoder
from .latent_parameters import LatentParameters

SCALE_PLANE = "indexer_scale"


class DsaDecoder(LatentDecoder):
    """Attends to selected rows. A cache has two pools: the "latent" rows of the stage's layers, and the keys of its
    indexers. Tensor-parallel ranks have the same content; with data-parallel attention, each has the rows of its own
    requests. A layer and the following ones that share its selection are an index group, with one set of keys.
    """

    def __init__(
        self, parameters: LatentParameters, parallel: Parallel = ALONE, *, packed: bool = False, fp8_index: bool = False
    ) -> None:
        """Latent rows are stored in the weights' dtype, or `packed` (kernels/dsa/packed_rows.py); indexer keys in the
        weights' dtype, or in fp8 (kernels/dsa/fp8_rows.py). Raises StartupError for a geometry without such a format.
        """
        assert parameters.config.dsa is not None
        if packed and parameters.config.dsa.kv_rank % 4:
            raise StartupError(
                f"kv_dtype fp8_e4m3 needs a kv_lora_rank that is a multiple of 4, got {parameters.config.dsa.kv_rank}"
            )
        if fp8_index and parameters.config.dsa.index_dim % 4:
            raise StartupError(
                f"index_dtype fp8_e4m3 needs an index_head_dim that is a multiple of 4, got "
                f"{parameters.config.dsa.index_dim}"
            )
        super().__init__(parameters, parallel)
        self._dsa = parameters.config.dsa
        self.packed: PackedFormat | None = None
        """How latent rows are packed, if they are."""
        if packed:
            dsa = parameters.config.dsa
            self.packed = PackedFormat(dsa.kv_rank, dsa.latent_dim, parameters.dtype, dsa.index_topk)
        self._fp8_index = fp8_index
        self._groups = [at - 1 for at in accumulate(layer.indexer is not None for layer in parameters.layers)]
        """The index group of each layer of this rank."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of both pools per token on this rank."""
        return sum(self._token_bytes(plane, self.parameters.shard) for plane in ("latent", "indexer"))

    def make_cache(self, num_pages: int, page_size: int) -> KvCache:
        """A cache of this rank's layers: the pool of latent rows, then the pool of indexer keys."""
        return KvCache(self._pool("latent", num_pages, page_size), self._pool("indexer", num_pages, page_size))

    def make_hisparse_cache(
        self, num_pages: int, page_size: int, *, hot_pages: int, slots: int, hot_rows: int, max_context: int
    ) -> HiSparseCache:
        """A cache with its latent rows in host memory. Up to `slots` requests of `max_context` tokens have hot buffers
        of `hot_rows` rows each, in `hot_pages` hot pages and in those that overlap the keys
        (memory/hisparse/shared_pool.py). Raises StartupError for incompatible sizes.
        """
        shard = self.parameters.shard
        of_stages = [self._overlay(num_pages, replace(shard, stage=stage)) for stage in range(shard.stages)]
        all_hot_pages = of_stages[shard.stage].covered + hot_pages
        host = self._pool("latent", num_pages, page_size, in_host_memory=True)
        memory = zeroed(all_hot_pages * host.page_bytes, self.parameters.device)
        return HiSparseCache(
            host,
            self._pool("indexer", num_pages, page_size, memory=memory),
            self._pool("latent", all_hot_pages, page_size, memory=memory),
            slots=slots,
            hot_rows=hot_rows,
            max_context=max_context,
            top_k=self._dsa.index_topk,
            groups=self._groups,
            overlay=PoolOverlay.agreed(of_stages),
        )

    def _pool(
        self,
        plane: str,
        num_pages: int,
        page_size: int,
        *,
        in_host_memory: bool = False,
        memory: torch.Tensor | None = None,
    ) -> KvPool:
        layers = self._layers(plane, self.parameters.shard)
        row_size, dtype = self._row(plane)
        device = self.parameters.device
        return KvPool(
            num_pages=num_pages,
            num_layers=len(layers),
            first_layer=layers.start,
            num_heads=1,
            page_size=page_size,
            head_dim=row_size,
            dtype=dtype,
            device=torch.device("cpu") if in_host_memory and device.type != "meta" else device,
            planes=(plane,),
            scale_plane=SCALE_PLANE if self._has_scales(plane) else None,
            pinned=in_host_memory and device.type == "cuda",
            memory=memory,
        )

    def _overlay(self, num_pages: int, shard: Shard) -> PoolOverlay:
        """How pages of keys and hot pages overlap on a rank of this server; both have the same number of tokens."""
        return PoolOverlay.of(
            num_pages,
            kv_page_bytes=self._token_bytes("indexer", shard),
            hot_page_bytes=self._token_bytes("latent", shard),
        )

    def _token_bytes(self, plane: str, shard: Shard) -> int:
        row_size, dtype = self._row(plane)
        scale_bytes = SCALE_BYTES if self._has_scales(plane) else 0
        return len(self._layers(plane, shard)) * (row_size * dtype.itemsize + scale_bytes)

    def _layers(self, plane: str, shard: Shard) -> range:
        """The layers of a plane that a rank has: layers of the model, or indexers."""
        return self._dsa.stage_indexers(shard) if plane == "indexer" else self._dsa.stage_layers(shard)

    def _row(self, plane: str) -> tuple[int, torch.dtype]:
        """Elements of a token's row in one layer, and their dtype."""
        if plane == "indexer":
            return self._dsa.index_dim, FP8 if self._fp8_index else self.parameters.dtype
        if self.packed is not None:
            return packed_bytes(self._dsa.kv_rank, self._dsa.rope_dim), torch.uint8
        return self._dsa.latent_dim, self.parameters.dtype

    def _has_scales(self, plane: str) -> bool:
        return plane == "indexer" and self._fp8_index

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        *,
        hidden: torch.Tensor | None = None,
        live_rows: torch.Tensor | None = None,
        last_only: bool = False,
        plan: IndexPlan | None = None,
        rows: LatentRows | None = None,
    ) -> torch.Tensor:
        """Write the rows and keys of all tokens into `cache`; returns the output of the stage's last layer,
        [T, hidden], for `logits` or for the next stage, which gets it as `hidden`. The first stage gets None. With
        `last_only`, returns only the `last_rows` of the batch.

        `live_rows` (on the device, one integer) is the number of valid rows of a padded batch: the others write
        nothing, and their results are undefined. `plan` is given for a batch without slices, in a CUDA graph. `rows`
        gives access to the latent rows, by default to those of `cache`: in its pages, or in hot buffers.
        """
        latent_pool, index_pool = cache.pools
        plan = plan or _plan(batch, cache.page_size)
        new_rows = new_token_rows(batch, cache.page_size, live_rows)
        if rows is None and isinstance(cache, HiSparseCache):
            assert batch.hot_slots is not None, "a sequence over a HiSparse cache has a hot slot"
            resident = batch.all_resident or all_resident(cache, batch.slices)
            rows = HotLatentRows(cache, plan, new_rows, batch.hot_slots, all_resident=resident, packed=self.packed)
        elif rows is None:
            rows = PagedLatentRows(latent_pool, plan, new_rows, self.packed)
        if hidden is None:
            hidden = self._vocabulary.embed(batch.token_ids)
        dsa, cos_sin = self._dsa, self._rotary.cos_sin(batch.positions)
        layers = self.parameters.layers
        normed = self._enter(hidden)
        for index, layer in enumerate(layers):  # like the latent pool, `index` counts the layers of this rank
            key_planes = index_pool.layer(self._groups[index])
            key = self._key_write(layer.indexer, key_planes, new_rows)
            weights = None
            if layer.indexer is not None:
                weights = beside_if_few(normed, partial(index_weights, normed, layer.indexer))
            compressed = compress(normed, layer.attention, *cos_sin, rows.place(index), key)
            to_expand = compressed, layer.attention, dsa, *cos_sin
            expand = Beside(compressed, partial(expand_head_queries, *to_expand))
            if weights is not None:
                index_query = expand_index_queries(*to_expand, fp8_index=self._fp8_index)
                scales = None if index_query.scales is None else IndexScales(index_query.scales, key_planes[1])
                selected = index_topk(
                    index_query.values,
                    weights(),
                    key_planes[0],
                    plan,
                    dsa.index_topk,
                    scales=scales,
                    rows_of=rows.rows_of,
                    meanwhile=expand.start,
                )
                rows.select(index, selected)
            query = expand.result()
            pages, selected = rows.selected(index)
            attend = sparse_mla if pages.dtype == query.dtype else sparse_mla_packed
            attended = attend(query, pages, selected, scale=self._scale, value_dim=dsa.kv_rank)
            hidden, normed = self._finish_layer(index, attended, hidden, batch, last_only=last_only)
        rows.finish()
        return hidden

    def _key_write(
        self, indexer: IndexerParameters | None, planes: tuple[torch.Tensor, ...], rows: KvRows
    ) -> KeyWrite | None:
        """Where a layer writes its keys; `planes` has keys and, in fp8, their scales."""
        if indexer is None:
            return None
        pages, scales = planes[0].squeeze(1), planes[1][:, 0, :, 0] if self._fp8_index else None
        return KeyWrite(indexer.key_norm, indexer.key_norm_bias, pages, rows, self._dsa.index_interleaved, scales)


def _plan(batch: ForwardBatch, page_size: int) -> IndexPlan:
    """What the tokens of a batch see."""
    return IndexPlan.build(
        [len(piece.token_ids) for piece in batch.slices],
        [piece.end for piece in batch.slices],
        [piece.pages for piece in batch.slices],
        page_size=page_size,
        device=batch.token_ids.device,
    )
