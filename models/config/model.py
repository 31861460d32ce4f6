"""The configuration of a model as one value: families read it (families/), and all else asks it. No torch."""

from dataclasses import dataclass, replace
from typing import Literal

from ...common.errors import StartupError
from ..weights.schemes import Scheme
from .dsa import DsaConfig
from .mla import MlaConfig
from .moe import MoeConfig
from .rope import RopeConfig
from .sharding import Shard

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Names:
    """What checkpoints call the parts of a layer's MLP or mixture of experts."""

    mlp: str = "mlp"
    mixture: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: bool = False  # all experts are one tensor, [experts, in, out], and rows of gate and up alternate


LLAMA_NAMES = Names()


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder and its EOS tokens: those of config, generation config and tokenizer.

    Layers that are `mixed` have a mixture of experts, `moe`, instead of an MLP of `intermediate_size`. Models with
    latent attention have `mla`: they have one KV head, the latent row that all query heads share, and `head_dim` is its
    width.
    """

    architecture: str  # the name of its family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    mixed: tuple[bool, ...] = ()  # by layer; empty without `moe`
    scheme: Scheme | None = None  # how the checkpoint stores matrices; None: in 16 or 32 bits, or in a GGUF file
    window: int | None = None  # tokens that a windowed layer sees
    windowed: tuple[bool, ...] = ()  # by layer; empty without `window`
    local_rope: RopeConfig | None = None  # of windowed layers, if they have another one
    query_scalar: int | None = None  # attention scores are divided by its root; None: by that of `head_dim`
    gelu: bool = False  # the gates of MLPs are GELU (tanh) instead of SiLU
    pre_norms: bool = True  # the inputs of attention and of the MLP are normed
    post_norms: bool = False  # the results of attention and of the MLP are normed before they are added
    norm_offset: float = 0.0  # added to the weights of norms
    float32_norms: bool = False  # the weights of norms are float32, and their results are rounded once
    scaled_embedding: bool = False  # embeddings are multiplied with the root of `hidden_size`
    logit_cap: float | None = None  # logits are cap * tanh(logits / cap)
    sinks: bool = False  # attention has a sink per query head
    names: Names = LLAMA_NAMES

    @property
    def dsa(self) -> DsaConfig | None:
        """Latent attention with an indexer; None for other models."""
        return self.mla if isinstance(self.mla, DsaConfig) else None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def active_parameters(self) -> int:
        """Weights of all layers that one token is multiplied with; of a mixture of experts, the selected ones."""
        if self.mla is not None:
            attention = self.mla.active_parameters(self.hidden_size, self.num_heads, self.num_layers)
        else:
            per_layer = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
            attention = self.num_layers * per_layer
        experts = sum(self.mixed) * self.moe.active_size if self.moe is not None else 0
        mlps = experts + (self.num_layers - sum(self.mixed)) * self.intermediate_size
        return attention + 3 * self.hidden_size * mlps

    @property
    def page_window(self) -> int | None:
        """The sliding window if all layers have it: then pages before the window, which all layers share, are freed.
        None for a window of a single token, which sees no earlier page.
        """
        return self.window if self.windowed and all(self.windowed) and self.window != 1 else None

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a global layer; None if it has full attention."""
        return self.window if self.windowed and self.windowed[layer] else None

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The mixture of experts of a global layer; None if it has an MLP."""
        return self.moe if self.mixed and self.mixed[layer] else None

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers, with all experts."""
        if self.moe is None:
            return self.active_parameters
        return replace(self, moe=replace(self.moe, experts_per_token=self.moe.num_experts)).active_parameters

    @property
    def parameters(self) -> int:
        """All weights, but for norms, biases and routers, which are small."""
        return self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    def stage_layers(self, shard: Shard) -> range:
        """Global layers of a stage; raises StartupError if there are too many stages."""
        return shard.layers(self.num_layers) if self.dsa is None else self.dsa.stage_layers(shard)

    def check_shares(self, shard: Shard) -> None:
        """Raise StartupError unless tensor-parallel ranks can divide this model like this."""
        if shard.dp_attention and not any(self.mixed):
            raise StartupError(f"dp_attention needs a model with experts, and {self.architecture} has none")
        shard.attention.part("num_attention_heads", self.num_heads)
        if self.mla is None:
            shard.attention.kv_heads(self.num_kv_heads)
        if self.moe is not None and any(self.mixed):
            self.moe.share(shard, self.hidden_size)
            self.moe.shared_share(shard)
        if not all(self.mixed) or not self.mixed:
            shard.part("intermediate_size", self.intermediate_size)
