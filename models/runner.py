"""A rank's part of a loaded model on one device: the interface that ranks compute with."""

from collections.abc import Sequence

import torch

from ..common.errors import StartupError
from ..configs.setting_types import CpuKernelsSetting, DtypeSetting, IndexDtypeSetting, KvDtypeSetting, LoadFormat
from ..kernels.backends.dispatch import prepare_kernels
from ..kernels.backends.half_products import choose_products
from ..memory.hisparse.cache import HiSparseCache
from ..memory.kv_pool import KvCache
from .config.model import ModelConfig
from .config.sharding import WHOLE, RankTokens, Shard
from .decoders.dense import Decoder
from .decoders.dense_parameters import DecoderParameters
from .decoders.dsa import DsaDecoder
from .decoders.latent_parameters import LatentParameters
from .decoders.mla import MlaDecoder
from .graphs.capture import AnyDecoder, ChunkGraphs, DecodeGraphs, StepGraphs
from .layers.batch import ForwardBatch, SequenceSlice
from .layers.parallel import ALONE, Parallel
from .loading.catalog import ModelSource
from .loading.dummy_weights import fill_with_noise
from .loading.weights import allocate_parameters, load_weights, stored_format, tensor_names
from .weights.format import Format

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)
_KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}


def resolve_dtype(name: DtypeSetting, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU; on CUDA the checkpoint's 16-bit type, or bfloat16 if it is stored in 32 bits."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if config.dtype == "float32" else _DTYPES[config.dtype]


def uses_fp8_index(setting: IndexDtypeSetting, device: torch.device, dtype: torch.dtype, index_dim: int) -> bool:
    """Whether indexer keys of a model of `dtype` are stored in fp8 on `device`. Raises StartupError for a GPU without
    fp8.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and setting != "model" else None
    has_fp8 = capability is not None and capability >= FP8_CAPABILITY
    if setting == "fp8_e4m3" and capability is not None and not has_fp8:
        found, least = (".".join(map(str, pair)) for pair in (capability, FP8_CAPABILITY))
        raise StartupError(
            f"index_dtype fp8_e4m3 needs a GPU of capability {least} or above, and {device} has {found}: use model"
        )
    return fp8_index(setting, dtype, index_dim, has_fp8=has_fp8)


def fp8_index(setting: IndexDtypeSetting, dtype: torch.dtype, index_dim: int, *, has_fp8: bool) -> bool:
    """The meaning of `index_dtype`. `auto` is fp8 for 16-bit models on GPUs that have it, if keys have a multiple of 4
    elements; on the CPU and in float32 selections stay exact.
    """
    if setting == "auto":
        return has_fp8 and dtype != torch.float32 and index_dim % 4 == 0
    return setting == "fp8_e4m3"


def _decoder(
    parameters: DecoderParameters | LatentParameters, parallel: Parallel, kv_dtype: KvDtypeSetting, *, fp8_index: bool
) -> AnyDecoder:
    if isinstance(parameters, LatentParameters) and parameters.config.dsa is None:
        if kv_dtype != "auto":
            raise StartupError(f"kv_dtype {kv_dtype} is not supported for {parameters.config.architecture}: use auto")
        return MlaDecoder(parameters, parallel)
    if isinstance(parameters, LatentParameters):
        return DsaDecoder(parameters, parallel, packed=kv_dtype == "fp8_e4m3", fp8_index=fp8_index)
    return Decoder(parameters, parallel, kv_dtype=_KV_DTYPES[kv_dtype])


def _kept(stored: Format | None, device: torch.device, *, keep_blocks: bool) -> Format | None:
    """The format of a checkpoint if its tensors stay as stored on `device`. `keep_blocks`: those of a CPU do."""
    if stored is None or not stored.runs_on(device):
        return None
    return stored if keep_blocks or not stored.on_cpu else None


class ModelRunner:
    """Owns the weights. The caller owns the KV cache and passes the pages of each sequence per call.

    All ranks of a server make the same calls in the same order, each with its own cache. Each pipeline stage sends
    hidden states to the next one; all stages but the last return no result, and do not wait for the next stage. With
    data-parallel attention, the ranks of a stage run different slices in a step, and each call gets the numbers of
    tokens of all ranks, `ranks`. A rank without slices calls `assist`.
    """

    def __init__(
        self, decoder: AnyDecoder, *, device: torch.device, dtype: torch.dtype, parallel: Parallel = ALONE
    ) -> None:
        self._decoder = decoder
        self.config = decoder.config
        self.device = device
        self.dtype = dtype
        self.parallel = parallel
        self._graphs: list[StepGraphs] = []

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
        index_dtype: IndexDtypeSetting = "auto",
        cpu_kernels: CpuKernelsSetting = "auto",
        keep_blocks: bool = False,
    ) -> "ModelRunner":
        """Read this rank's weights into memory of `device`; raises StartupError if they do not fit or divide. With
        `keep_blocks`, matrices of a GGUF file stay in its blocks where possible.
        """
        stored = stored_format(source, load_format)
        kept = _kept(stored, device, keep_blocks=keep_blocks)
        prepare_kernels(device, dtype, cpu_kernels, blocks=kept is not None)
        if device.type == "cpu":
            choose_products(dtype, parallel.agree_minimum)
        try:
            parameters = allocate_parameters(
                source.config,
                parallel.shard,
                device=device,
                dtype=dtype,
                stored=kept,
            )
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"model {source.name}: not enough memory on {device} for its weights: {error}"
            ) from error
        slots = parameters.slots()
        if stored is not None:
            stored.log_expansion(slots, device, keep=kept is not None)
        if load_format == "dummy":
            fill_with_noise(slots, stored)
        else:
            load_weights(source, slots, tensor_names(source.config))
        dsa = source.config.dsa
        keys_in_fp8 = dsa is not None and uses_fp8_index(index_dtype, device, dtype, dsa.index_dim)
        decoder = _decoder(parameters, parallel, kv_dtype, fp8_index=keys_in_fp8)
        return cls(decoder, device=device, dtype=dtype, parallel=parallel)

    @classmethod
    def outline(
        cls,
        config: ModelConfig,
        shard: Shard = WHOLE,
        *,
        dtype: torch.dtype,
        kv_dtype: KvDtypeSetting = "auto",
        stored: Format | None = None,
        fp8_index: bool = False,
    ) -> "ModelRunner":
        """A runner on torch's meta device. It takes no memory and computes nothing; its caches have the sizes of those
        of a loaded one. `stored` has the tensors that stay as they are stored, `fp8_index` says whether
        indexer keys are in fp8. Raises StartupError if the model cannot be divided like this.
        """
        meta, parallel = torch.device("meta"), Parallel(shard)
        parameters = allocate_parameters(config, shard, device=meta, dtype=dtype, stored=stored)
        decoder = _decoder(parameters, parallel, kv_dtype, fp8_index=fp8_index)
        return cls(decoder, device=meta, dtype=dtype, parallel=parallel)

    @staticmethod
    def weight_bytes(
        source: ModelSource,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        *,
        device: torch.device,
        load_format: LoadFormat = "auto",
        keep_blocks: bool = False,
    ) -> int:
        """Bytes of the weights of `shard` on `device`, without reading any."""
        kept, meta = _kept(stored_format(source, load_format), device, keep_blocks=keep_blocks), torch.device("meta")
        return allocate_parameters(source.config, shard, device=meta, dtype=dtype, stored=kept).memory.nbytes

    @property
    def held_weight_bytes(self) -> int:
        """Bytes of the weights of this runner."""
        return self._decoder.parameters.memory.nbytes

    def most_unpacked_rows(self, tokens: int) -> int:
        """The most rows of the cache that a step of `tokens` tokens unpacks; 0 if rows are not packed."""
        packed = self._decoder.packed if isinstance(self._decoder, DsaDecoder) else None
        return 0 if packed is None else packed.most_shared_rows(tokens)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV per token, over all layers and heads of this rank."""
        return self._decoder.kv_token_bytes

    def make_cache(self, num_pages: int, page_size: int) -> KvCache:
        """A KV cache of this rank's geometry, dtype and device."""
        return self._decoder.make_cache(num_pages, page_size)

    def make_hisparse_cache(
        self, num_pages: int, page_size: int, *, hot_pages: int, slots: int, hot_rows: int, max_context: int
    ) -> HiSparseCache:
        """A KV cache in host memory with hot rows on the device (DsaDecoder); for sparse attention only."""
        assert isinstance(self._decoder, DsaDecoder), "the configuration was checked against the model"
        return self._decoder.make_hisparse_cache(
            num_pages, page_size, hot_pages=hot_pages, slots=slots, hot_rows=hot_rows, max_context=max_context
        )

    def capture_graphs(self, cache: KvCache, *, max_batch: int, max_context: int) -> DecodeGraphs | None:
        """Run decode steps over `cache` as CUDA graphs from now on; no other cache may be used after that. Takes
        seconds.

        The logits of such a step are overwritten by the next one. All ranks of a stage call it at the same time.
        Returns None, and does nothing, if graphs are not possible: with tensor parallelism over gloo, and for mixtures
        of experts in dtypes other than bfloat16, which torch computes expert by expert.
        """
        if not self._capturable:
            return None
        graphs = DecodeGraphs(
            self._decoder, cache, max_batch=max_batch, max_context=max_context, parallel=self.parallel
        )
        self._graphs.append(graphs)
        return graphs

    def capture_chunk_graphs(
        self, cache: KvCache, *, max_tokens: int, max_slices: int, max_context: int, decode_rows: bool = False
    ) -> ChunkGraphs | None:
        """The same for steps of prompt chunks."""
        if not self._capturable:
            return None
        graphs = ChunkGraphs(
            self._decoder,
            cache,
            max_tokens=max_tokens,
            max_slices=max_slices,
            max_context=max_context,
            decode_rows=decode_rows,
            parallel=self.parallel,
        )
        self._graphs.append(graphs)
        return graphs

    @property
    def _capturable(self) -> bool:
        return self.parallel.capturable and self._decoder.capturable

    def release_graphs(self) -> None:
        """Free the graphs and their memory, if any. After that, their cache can be freed."""
        self._graphs.clear()

    @torch.inference_mode()
    def forward(
        self,
        cache: KvCache,
        slices: Sequence[SequenceSlice],
        token_ids: torch.Tensor | None = None,
        *,
        logits: bool = True,
        ranks: Sequence[RankTokens] | None = None,
    ) -> torch.Tensor | None:
        """Run the slices in one pass, which writes their KV to `cache`. Returns float32 logits [len(slices), vocab] of
        the last token of each slice on a sampling rank, None on all others. Slices of one call do not see each
        other's KV unless they share pages.

        `token_ids` (on the device, one per slice) replace those of slices of a single token: the step can start before
        the host knows the tokens. Only the first stage reads them. Without `logits` the result is [0, vocab].
        """
        for graphs in self._graphs:
            if (size := graphs.size_for(slices)) is not None:
                return graphs.run(slices, token_ids, logits=logits, size=size)
        batch = self._batch(cache, slices, token_ids, ranks)
        hidden = self._run(cache, batch, last_only=batch.last_rows is not None)
        if hidden is None or logits:
            return None if hidden is None else self._decoder.logits(hidden)
        sampling_rank = self.parallel.shard.samples
        return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32) if sampling_rank else None

    @torch.inference_mode()
    def forward_hidden(
        self, cache: KvCache, slices: Sequence[SequenceSlice], *, ranks: Sequence[RankTokens] | None = None
    ) -> torch.Tensor | None:
        """Like `forward`, but returns the input of `logits` for every token, [tokens of all slices, hidden], on all
        ranks of the last stage, None on all others: logits of a whole prompt would be larger than its KV.
        """
        return self._run(cache, self._batch(cache, slices, ranks=ranks))

    @torch.inference_mode()
    def assist(self, ranks: Sequence[RankTokens]) -> None:
        """Take part in a step in which this rank has no slices (data-parallel attention)."""
        self._decoder.assist(ranks)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Float32 logits [N, vocab] of rows of `forward_hidden`. All ranks of the last stage call it with the same
        rows, or with data-parallel attention on its own; returns None on all but the sampling ranks.
        """
        return self._decoder.logits(hidden)

    def _run(self, cache: KvCache, batch: ForwardBatch, *, last_only: bool = False) -> torch.Tensor | None:
        """This stage's layers, with transfers from the previous and to the next stage; None if there is a next one.
        With `last_only`, returns only the last row of each slice.
        """
        shard, received = self.parallel.shard, None
        if not shard.first:
            received = self.parallel.receive_hidden(len(batch.token_ids), self.config.hidden_size, self.dtype)
        hidden = self._decoder.hidden(batch, cache, hidden=received, last_only=last_only and shard.last)
        if shard.last:
            return hidden
        self.parallel.send_hidden(hidden)
        return None

    def _batch(
        self,
        cache: KvCache,
        slices: Sequence[SequenceSlice],
        token_ids: torch.Tensor | None = None,
        ranks: Sequence[RankTokens] | None = None,
    ) -> ForwardBatch:
        config, kv_heads = self.config, cache.pools[0].num_heads
        return ForwardBatch.build(
            slices,
            page_size=cache.page_size,
            num_kv_heads=kv_heads if config.mla is None else None,
            num_heads=kv_heads * config.num_heads // config.num_kv_heads,
            window=config.window,
            device=self.device,
            token_ids=token_ids,
            ranks=ranks,
        )
