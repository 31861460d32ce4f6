"""A loaded model on one device: what an engine process calls to compute."""

from collections.abc import Sequence
from typing import Literal

import torch

from ..configs.errors import StartupError
from ..memory.kv_pool import KvPool
from .batch import ForwardBatch, SequenceSlice
from .catalog import ModelSource
from .config import ModelConfig
from .decoder import Decoder
from .graphs import DecodeGraphs
from .parameters import DecoderParameters
from .weights import load_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16", "float16"], config: ModelConfig, device: torch.device
) -> torch.dtype:
    """`auto` is float32 on CPU; on CUDA the checkpoint's own 16-bit type, bfloat16 where it is stored in 32 bits."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if config.dtype == "float32" else _DTYPES[config.dtype]


class ModelRunner:
    """Owns the weights. The KV pool belongs to the caller, who says per call where each sequence's KV is."""

    def __init__(self, decoder: Decoder, *, device: torch.device, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.device = device
        self.dtype = dtype
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, source: ModelSource, *, device: torch.device, dtype: torch.dtype) -> "ModelRunner":
        """Read the weights straight into their place on `device`; raises StartupError when they do not fit."""
        try:
            parameters = DecoderParameters.allocate(source.config, device=device, dtype=dtype)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"model {source.name}: not enough memory on {device} for its weights: {error}"
            ) from error
        load_weights(source, parameters.slots())
        return cls(Decoder(parameters), device=device, dtype=dtype)

    @staticmethod
    def weight_bytes(source: ModelSource, dtype: torch.dtype) -> int:
        """What the weights will take, without reading any."""
        shapes = DecoderParameters.allocate(source.config, device=torch.device("meta"), dtype=dtype).slots().values()
        return sum(shape.nbytes for shape in shapes)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        return self.config.num_layers * 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize

    def make_pool(self, num_pages: int, page_size: int) -> KvPool:
        """A KV pool of this model's geometry, dtype and device."""
        return KvPool(
            num_pages=num_pages,
            num_layers=self.config.num_layers,
            num_heads=self.config.num_kv_heads,
            page_size=page_size,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def capture_graphs(self, pool: KvPool, *, max_batch: int, max_context: int) -> None:
        """From now on run decode steps over `pool` as CUDA graphs; no other pool may be used then. Takes seconds.

        The logits of such a step are overwritten by the next one.
        """
        self._graphs = DecodeGraphs(self._decoder, pool, max_batch=max_batch, max_context=max_context)

    @torch.inference_mode()
    def forward(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run the slices in one pass: their KV is in `pool` afterwards. Returns float32 logits [len(slices), vocab] of
        the last token of each slice. Slices of one call do not see each other's KV unless they share pages.
        """
        if self._graphs is not None and self._graphs.fits(slices):
            return self._graphs.run(slices)
        return self._decoder.forward(self._batch(pool, slices), pool)

    @torch.inference_mode()
    def forward_hidden(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """As `forward`, but returns what `logits` needs of every token, [tokens of all slices, hidden]: logits of a
        whole prompt would be larger than its KV.
        """
        return self._decoder.hidden(self._batch(pool, slices), pool)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, vocab] of rows that `forward_hidden` returned."""
        return self._decoder.logits(hidden)

    def _batch(self, pool: KvPool, slices: Sequence[SequenceSlice]) -> ForwardBatch:
        return ForwardBatch.build(
            slices, page_size=pool.page_size, num_kv_heads=self.config.num_kv_heads, device=self.device
        )
