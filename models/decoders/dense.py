"""The forward pass of a decoder with full or windowed attention over a paged KV cache: one rank's share of it.

The order of operations and of roundings is that of transformers 5.17, so that greedy tokens agree in every dtype: norms
are in float32 with the weight applied after the cast back, cos and sin are rounded to the model's dtype. With several
ranks, each rounds its part before the parts are summed; in float32 this changes only the last digits.
"""

import torch

from ...kernels.attention.gather_plan import GatherPlan
from ...kernels.attention.rope_attention import rope_attention
from ...memory.kv_pool import KvCache, KvPool
from ..layers.batch import ForwardBatch
from ..layers.parallel import ALONE, Parallel
from ..layers.rope import Rotary
from .dense_parameters import DecoderParameters
from .layer_stack import make_layer_stack
from .stage import StageDecoder


class Decoder(StageDecoder[DecoderParameters]):
    """Every rank of a stage computes all rows, with its heads, its part of the feed-forward width and of the
    vocabulary. After each layer all have the same hidden state.
    """

    def __init__(
        self, parameters: DecoderParameters, parallel: Parallel = ALONE, *, kv_dtype: torch.dtype | None = None
    ) -> None:
        """KV is stored in `kv_dtype`; by default in the dtype of the weights."""
        super().__init__(parameters, parallel)
        self._kv_dtype = kv_dtype or parameters.dtype
        self._local_rotary: Rotary | None = None
        if (local := self.config.local_rope) is not None:
            self._local_rotary = Rotary(self.config, parameters.device, parameters.dtype, local)
        self._windowed = [self.config.window_of(layer) is not None for layer in parameters.layer_range]
        self._scale = (self.config.query_scalar or self.config.head_dim) ** -0.5
        self._stack = None if parallel.shard.tp_size > 1 else make_layer_stack(parameters, self._kv_dtype, self._scale)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV per token on this rank."""
        parameters = self.parameters
        rows = 2 * len(parameters.layer_range) * len(parameters.kv_heads)
        return rows * self.config.head_dim * self._kv_dtype.itemsize

    def make_cache(self, num_pages: int, page_size: int) -> KvCache:
        """A KV cache of this rank's layers and heads: a single pool."""
        parameters = self.parameters
        return KvCache(
            KvPool(
                num_pages=num_pages,
                num_layers=len(parameters.layer_range),
                num_heads=len(parameters.kv_heads),
                page_size=page_size,
                head_dim=self.config.head_dim,
                dtype=self._kv_dtype,
                device=parameters.device,
                first_layer=parameters.layer_range.start,
                first_head=parameters.kv_heads.start,
            )
        )

    def hidden(
        self,
        batch: ForwardBatch,
        cache: KvCache,
        *,
        hidden: torch.Tensor | None = None,
        live_rows: torch.Tensor | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Write the KV of all tokens into `cache`; returns the output of the stage's last layer, [T, hidden], for
        `logits` or for the next stage, which gets it as `hidden`. The first stage gets None. With `last_only`, returns
        only the `last_rows` of the batch; for the other rows, the last layer then computes only KV.

        `live_rows` (on the device, one integer) is the number of valid rows of a padded batch: the others write
        nothing, and their results are undefined.
        """
        layers = self.parameters.layers
        (pool,) = cache.pools
        if hidden is None:
            hidden = self._vocabulary.embed(batch.token_ids)
        angles = local_angles = self._rotary.cos_sin(batch.positions)
        if self._local_rotary is not None:
            local_angles = self._local_rotary.cos_sin(batch.positions)
        if self._stack is not None and self._stack.computes(batch.attention):
            assert isinstance(batch.attention, GatherPlan)
            pages = [pool.layer(index) for index in range(len(layers))]
            return self._stack.run(hidden, angles, pages, batch.page_ids, batch.offsets, batch.attention)
        normed = self._enter(hidden)
        for index, layer in enumerate(layers):
            qkv = layer.qkv.linear(normed, layer.qkv_bias)
            if layer.step is not None:
                layer.step(qkv, self._parallel)
            windowed = self._windowed[index]
            cos, signed_sin = local_angles if windowed else angles
            key_pages, value_pages = pool.layer(index)  # like the pool, `index` counts the layers of this rank
            at_end = last_only and index + 1 == len(layers)
            plan = batch.windowed if windowed else batch.attention
            assert plan is not None, "the batch was planned for this model"
            attended = rope_attention(
                qkv,
                cos,
                signed_sin,
                key_pages,
                value_pages,
                batch.page_ids,
                batch.offsets,
                plan,
                scale=self._scale,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=self.config.norm_eps,
                sinks=layer.sinks,
                live_rows=live_rows,
                last_only=at_end,
            )
            if at_end:
                assert batch.last_rows is not None
                attended, hidden = (rows.index_select(0, batch.last_rows) for rows in (attended, hidden))
            hidden, normed = self._leave(index, layer.o.linear(attended.flatten(1), layer.o_bias), hidden, batch)
        return hidden
