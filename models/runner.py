"""A rank's part of a loaded model on one device: what an engine process calls to compute."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from ..configs.errors import StartupError
from ..configs.schema import KvDtypeSetting, LoadFormat
from ..kernels.backends.dispatch import prepare_kernels
from ..memory.hisparse.cache import HiSparseCache
from ..memory.kv_pool import KvCache
from .config.model import ModelConfig
from .config.sharding import WHOLE, Shard
from .decoders.dense import Decoder
from .decoders.dense_parameters import DecoderParameters
from .decoders.dsa import DsaDecoder
from .decoders.dsa_parameters import DsaParameters
from .graphs.capture import DecodeGraphs
from .layers.batch import ForwardBatch, SequenceSlice
from .layers.parallel import ALONE, Parallel
from .loading.catalog import ModelSource
from .loading.dummy_weights import fill_with_noise
from .loading.weights import load_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16", "float16"], config: ModelConfig, device: torch.device
) -> torch.dtype:
    """`auto` is float32 on CPU; on CUDA the checkpoint's own 16-bit type, bfloat16 where it is stored in 32 bits."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if config.dtype == "float32" else _DTYPES[config.dtype]


class AnyDecoder(Protocol):
    """One rank's share of a model, of whatever architecture; decoder.py says what each method does."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kv_token_bytes(self) -> int: ...

    def make_cache(self, num_pages: int, page_size: int) -> KvCache: ...

    def hidden(self, batch: ForwardBatch, cache: KvCache, *, hidden: torch.Tensor | None = None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None: ...


def allocate_parameters(
    config: ModelConfig, shard: Shard, *, device: torch.device, dtype: torch.dtype
) -> DecoderParameters | DsaParameters:
    """Uninitialised weights of the architecture; raises StartupError where the model cannot be shared so."""
    architecture = DecoderParameters if config.dsa is None else DsaParameters
    return architecture.allocate(config, shard, device=device, dtype=dtype)


def build_decoder(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    parallel: Parallel,
    load_format: LoadFormat,
    kv_dtype: KvDtypeSetting,
) -> AnyDecoder:
    """Read this rank's weights straight into their place on `device`; raises StartupError when they do not fit."""
    config = source.config
    prepare_kernels(device, dtype)
    try:
        parameters = allocate_parameters(config, parallel.shard, device=device, dtype=dtype)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"model {source.name}: not enough memory on {device} for its weights: {error}") from error
    if load_format == "dummy":
        fill_with_noise(parameters.slots())
    else:
        load_weights(source, parameters.slots(), parameters.names(config))
    if isinstance(parameters, DsaParameters):
        return DsaDecoder(parameters, parallel, packed=kv_dtype == "fp8_e4m3")
    return Decoder(parameters, parallel, kv_dtype=_KV_DTYPES[kv_dtype])


class ModelRunner:
    """Owns the weights. The KV cache belongs to the caller, who says per call where each sequence's KV is.

    All ranks of a server make the same calls in the same order, each with its own cache. Stages hand hidden states on:
    those before the last have no result, and do not wait for the next.
    """

    def __init__(
        self, decoder: AnyDecoder, *, device: torch.device, dtype: torch.dtype, parallel: Parallel = ALONE
    ) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.device = device
        self.dtype = dtype
        self.parallel = parallel
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        parallel: Parallel = ALONE,
        load_format: LoadFormat = "auto",
        kv_dtype: KvDtypeSetting = "auto",
    ) -> "ModelRunner":
        """Read the weights of this rank's shard; raises StartupError when they do not fit or cannot be shared so."""
        decoder = build_decoder(
            source, device=device, dtype=dtype, parallel=parallel, load_format=load_format, kv_dtype=kv_dtype
        )
        return cls(decoder, device=device, dtype=dtype, parallel=parallel)

    @staticmethod
    def weight_bytes(source: ModelSource, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
        """What the weights of `shard` will take, without reading any."""
        parameters = allocate_parameters(source.config, shard, device=torch.device("meta"), dtype=dtype)
        return sum(slot.target.nbytes for slot in parameters.slots().values())

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV that one token takes over all layers and heads of this rank."""
        return self._decoder.kv_token_bytes

    def make_cache(self, num_pages: int, page_size: int) -> KvCache:
        """A KV cache of this rank's geometry, dtype and device."""
        return self._decoder.make_cache(num_pages, page_size)

    def make_hisparse_cache(
        self, num_pages: int, page_size: int, *, hot_pages: int, slots: int, hot_rows: int, max_context: int
    ) -> HiSparseCache:
        """A KV cache in host memory with hot rows on the device, as DsaDecoder has it; for sparse attention only."""
        assert isinstance(self._decoder, DsaDecoder), "the configuration was checked against the model"
        return self._decoder.make_hisparse_cache(
            num_pages, page_size, hot_pages=hot_pages, slots=slots, hot_rows=hot_rows, max_context=max_context
        )

    def capture_graphs(self, cache: KvCache, *, max_batch: int, max_context: int) -> DecodeGraphs | None:
        """From now on run decode steps over `cache` as CUDA graphs; no other cache may be used then. Takes seconds.

        The logits of such a step are overwritten by the next one. Returns None, and does nothing, where graphs are not
        possible: with several ranks, whose exchanges are not captured, and for mixtures of experts in other dtypes than
        bfloat16, which torch computes expert by expert.
        """
        if self.parallel.shard.world_size > 1 or not isinstance(self._decoder, Decoder | DsaDecoder):
            return None
        if isinstance(self._decoder, DsaDecoder) and not self._decoder.capturable:
            return None
        self._graphs = DecodeGraphs(self._decoder, cache, max_batch=max_batch, max_context=max_context)
        return self._graphs

    def release_graphs(self) -> None:
        """Forget the graphs and their memory, if there are any; their cache may go then."""
        self._graphs = None

    @torch.inference_mode()
    def forward(
        self, cache: KvCache, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run the slices in one pass: their KV is in `cache` afterwards. Returns float32 logits [len(slices), vocab] of
        the last token of each slice on the rank that samples, None on all others. Slices of one call do not see each
        other's KV unless they share pages.

        `token_ids` (on the device, one for each of slices of a single token) stand for those of the slices: the step
        can be started before the host knows the tokens. Only the first stage reads them.
        """
        if self._graphs is not None and self._graphs.fits(slices):
            return self._graphs.run(slices, token_ids)
        batch = self._batch(cache, slices, token_ids)
        hidden = self._run(cache, batch)
        if hidden is None:
            return None
        return self._decoder.logits(hidden if batch.last_rows is None else hidden[batch.last_rows])

    @torch.inference_mode()
    def forward_hidden(self, cache: KvCache, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
        """As `forward`, but returns what `logits` needs of every token, [tokens of all slices, hidden], on all ranks of
        the last stage, None on all others: logits of a whole prompt would be larger than its KV.
        """
        return self._run(cache, self._batch(cache, slices))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Float32 logits [N, vocab] of rows that `forward_hidden` returned. All ranks of the last stage call it with
        the same rows; None on all but the one that samples.
        """
        return self._decoder.logits(hidden)

    def _run(self, cache: KvCache, batch: ForwardBatch) -> torch.Tensor | None:
        """This stage's layers, between the stages before and after it; None where there is one after."""
        shard, received = self.parallel.shard, None
        if not shard.first:
            received = self.parallel.receive_hidden(len(batch.token_ids), self.config.hidden_size, self.dtype)
        hidden = self._decoder.hidden(batch, cache, hidden=received)
        if shard.last:
            return hidden
        self.parallel.send_hidden(hidden)
        return None

    def _batch(
        self, cache: KvCache, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> ForwardBatch:
        return ForwardBatch.build(
            slices,
            page_size=cache.page_size,
            num_kv_heads=cache.pools[0].num_heads if self.config.dsa is None else None,
            device=self.device,
            token_ids=token_ids,
        )
