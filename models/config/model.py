"""The configuration of a model as one value, from config.json or GGUF metadata. No torch.

Supported are decoders of the Llama, Mistral, Qwen, Gemma and gpt-oss families, with full attention or sliding windows
(windows.py), with or without mixtures of experts (moe.py), and those of DeepSeek and GLM with latent attention
(mla.py), which may be sparse (dsa.py). Options that change the result and are not implemented (other rope kinds,
unknown quantisation) are refused here, before any weight is read.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from ...common.errors import StartupError
from ..formats.bounds import MOST_EXPERT_MLPS, MOST_PARAMETERS, most_of
from ..formats.gguf_end_tokens import gguf_end_tokens
from ..formats.gguf_file import GgufFile
from ..formats.json_fields import Json, bare, integer, number, read_json, shown, unusable_values
from ..weights.schemes import Scheme, read_mxfp4_experts, read_scheme
from .dsa import SPARSE_ATTENTION, DsaConfig, read_dsa_config
from .end_tokens import hf_end_tokens
from .gemma3 import read_gemma3
from .mla import MlaConfig, read_mla_config
from .moe import MoeConfig, grouped_moe_layers, read_gpt_oss_moe, read_grouped_moe, read_softmax_moe, softmax_moe_layers
from .rope import GPT_OSS_ROPE, RopeConfig, context_length, read_gguf_rope, read_hf_rope
from .sharding import Shard
from .windows import FULL, read_alternating_windows, read_layer_types, read_windows

DenseArchitecture = Literal[
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", "gpt_oss", "olmo2"
]
SparseArchitecture = Literal["deepseek_v32", "glm_moe_dsa"]
SPARSE_ARCHITECTURES: tuple[str, ...] = get_args(SparseArchitecture)
LatentArchitecture = Literal["deepseek_v3"] | SparseArchitecture
Architecture = DenseArchitecture | LatentArchitecture
DtypeName = Literal["float32", "bfloat16", "float16"]

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_text",
    "GptOssForCausalLM": "gpt_oss",
    "Olmo2ForCausalLM": "olmo2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_DEFAULT_CONTEXT: dict[Architecture, int] = {
    "llama": 2048,
    "mistral": 131072,
    "mixtral": 131072,
    "qwen2": 32768,
    "qwen3": 32768,
    "qwen3_moe": 32768,
    "gemma3_text": 131072,
    "gpt_oss": 131072,
    "olmo2": 2048,
    "deepseek_v3": 4096,
    "deepseek_v32": 163840,
    "glm_moe_dsa": 202752,
}
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma3_text": 256, "gpt_oss": 64}


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


_MIXTRAL_NAMES = Names(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder and its EOS tokens: those of config, generation config and tokenizer.

    Layers that are `mixed` have a mixture of experts, `moe`, instead of an MLP of `intermediate_size`. Models with
    latent attention have `mla`: they have one KV head, the latent row that all query heads share, and `head_dim` is its
    width.
    """

    architecture: Architecture
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
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    mixed: tuple[bool, ...] = ()  # by layer; empty without `moe`
    scheme: Scheme | None = None  # how the checkpoint stores matrices; None: in 16 or 32 bits, or in a GGUF file
    window: int | None = None  # tokens that a windowed layer sees
    windowed: tuple[bool, ...] = ()  # by layer; empty without `window`
    local_rope: RopeConfig | None = None  # of windowed layers, if they have another one
    query_scalar: int | None = None  # attention scores are divided by its root; None: by that of `head_dim`
    gelu: bool = False  # the gates of MLPs are GELU (tanh) instead of SiLU
    post_norms: bool = False  # the results of attention and of the MLP are normed before they are added
    norm_offset: float = 0.0  # added to the weights of norms
    float32_norms: bool = False  # the weights of norms are float32, and their results are rounded once
    scaled_embedding: bool = False  # embeddings are multiplied with the root of `hidden_size`
    logit_cap: float | None = None  # logits are cap * tanh(logits / cap)
    sinks: bool = False  # attention has a sink per query head
    names: Names = Names()

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


def read_config_file(path: Path) -> ModelConfig:
    """Parse a config.json, and the generation_config.json beside it, if there is one; raises StartupError."""
    raw = read_json(path)
    with unusable_values(path):
        config = _read_config(path, raw, _hf_architecture(path, raw))
        _check_size(path, config)
        return config


def _read_config(path: Path, raw: Json, architecture: Architecture) -> ModelConfig:
    if architecture == "deepseek_v3" or architecture == "deepseek_v32" or architecture == "glm_moe_dsa":
        return _latent_config(path, raw, architecture)
    if architecture == "gemma3_text":
        return _gemma3_config(path, raw)
    if architecture == "olmo2":
        return _olmo2_config(path, raw)
    return _gpt_oss_config(path, raw) if architecture == "gpt_oss" else _dense_config(path, raw, architecture)


def _check_size(path: Path, config: ModelConfig) -> None:
    """Raise StartupError for a model that is too large although each of its numbers is in its bounds (bounds.py)."""
    if config.context_length > (most := most_of("context_length")):
        raise StartupError(f"{path}: the context length must be at most {most}, got {config.context_length}")
    mlps = sum(config.mixed) * config.moe.num_experts if config.moe is not None else 0
    if mlps > MOST_EXPERT_MLPS:
        raise StartupError(f"{path}: the layers must have at most {MOST_EXPERT_MLPS} experts together, got {mlps}")
    if config.parameters > MOST_PARAMETERS:
        raise StartupError(f"{path}: the model must have at most {MOST_PARAMETERS} weights, got {config.parameters}")


def _dense_config(path: Path, raw: Json, architecture: DenseArchitecture) -> ModelConfig:
    _check_activation(path, raw)
    num_layers = integer(path, raw, "num_hidden_layers")
    windows = read_windows(path, raw, architecture, num_layers)
    has_experts = architecture in ("mixtral", "qwen3_moe")
    heads = integer(path, raw, "num_attention_heads")
    hidden = integer(path, raw, "hidden_size")
    kv_heads = integer(path, raw, "num_key_value_heads", heads)
    head_dim = integer(path, raw, "head_dim", _DEFAULT_HEAD_DIM.get(architecture, hidden // heads))
    _check_heads(path, heads, kv_heads, head_dim)
    max_positions = integer(path, raw, "max_position_embeddings", _DEFAULT_CONTEXT[architecture])
    attention_bias = bool(raw.get("attention_bias", False))
    rope = read_hf_rope(path, raw, max_positions, 1_000_000.0 if architecture == "mixtral" else 10_000.0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(path, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(path, raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length(rope, max_positions),
        norm_eps=number(path, raw, "rms_norm_eps", 1e-5 if architecture == "mixtral" else 1e-6),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or (architecture not in ("mistral", "mixtral") and attention_bias),
        o_bias=architecture in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "olmo2") and attention_bias,
        mlp_bias=architecture == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        dtype=_hf_dtype(path, raw),
        eos_token_ids=hf_end_tokens(path.parent, raw),
        moe=read_softmax_moe(path, raw, mixtral=architecture == "mixtral") if has_experts else None,
        mixed=softmax_moe_layers(path, raw, num_layers) if has_experts else (),
        scheme=read_scheme(path, raw),
        window=windows.window,
        windowed=windows.windowed,
        names=_MIXTRAL_NAMES if architecture == "mixtral" else Names(),
    )


def _gemma3_config(path: Path, raw: Json) -> ModelConfig:
    """Gemma 3: what it shares with Llama, read from the same fields, and its own."""
    own = read_gemma3(path, raw, integer(path, raw, "num_hidden_layers"))
    shared = {"hidden_act": "silu", "layer_types": None, "rope_scaling": None, "rope_parameters": own.rope}
    shared |= {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
    config = _dense_config(path, raw | shared, "gemma3_text")
    if config.scheme is not None:
        raise StartupError(f"{path}: quantized weights are not supported for gemma3_text; supported are 16 and 32 bits")
    return replace(
        config,
        qk_norm=True,
        window=own.windows.window,
        windowed=own.windows.windowed,
        local_rope=read_hf_rope(path, {"rope_parameters": own.local_rope}, config.context_length),
        query_scalar=own.query_scalar,
        gelu=True,
        post_norms=True,
        norm_offset=1.0,
        float32_norms=True,
        scaled_embedding=True,
        logit_cap=own.logit_cap,
    )


def _olmo2_config(path: Path, raw: Json) -> ModelConfig:
    """OLMo-2: the fields of Llama, and norms after attention and the MLP."""
    config = _dense_config(path, {"rms_norm_eps": 1e-5} | raw, "olmo2")
    return replace(config, post_norms=True, float32_norms=True)


def _gpt_oss_config(path: Path, raw: Json) -> ModelConfig:
    """gpt-oss: what it shares with Mixtral, read from the same fields, and its own."""
    num_layers = integer(path, raw, "num_hidden_layers")
    defaults: Json = {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}
    own: Json = {"layer_types": None, "quantization_config": None}
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        own["rope_scaling"] = GPT_OSS_ROPE
    config = _dense_config(path, defaults | raw | own, "gpt_oss")
    windows = read_alternating_windows(path, raw, num_layers)
    return replace(
        config,
        window=windows.window,
        windowed=windows.windowed,
        moe=read_gpt_oss_moe(path, raw),
        mixed=(True,) * num_layers,
        float32_norms=True,
        sinks=True,
        scheme=read_mxfp4_experts(path, raw),
        names=Names(router="router", stacked=True),
    )


def _latent_config(path: Path, raw: Json, architecture: LatentArchitecture) -> ModelConfig:
    _check_activation(path, raw)
    heads = integer(path, raw, "num_attention_heads")
    num_layers = integer(path, raw, "num_hidden_layers")
    read_layer_types(path, raw, num_layers, (FULL if architecture == "deepseek_v3" else SPARSE_ATTENTION,))
    max_positions = integer(path, raw, "max_position_embeddings", _DEFAULT_CONTEXT[architecture])
    rope = read_hf_rope(path, raw, max_positions)
    if rope.kind not in ("default", "yarn"):
        raise StartupError(
            f"{path}: rope type {rope.kind!r} is not supported for {architecture}; supported are default, yarn"
        )
    if architecture == "deepseek_v3":
        mla = read_mla_config(path, raw, num_heads=heads)
    else:
        mla = read_dsa_config(path, raw, num_layers=num_layers, num_heads=heads, glm=architecture == "glm_moe_dsa")
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(path, raw, "vocab_size"),
        hidden_size=integer(path, raw, "hidden_size"),
        intermediate_size=integer(path, raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=mla.latent_dim,
        context_length=context_length(rope, max_positions),
        norm_eps=number(path, raw, "rms_norm_eps", 1e-5 if architecture == "glm_moe_dsa" else 1e-6),
        rope=rope,
        tied_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype=_hf_dtype(path, raw),
        eos_token_ids=hf_end_tokens(path.parent, raw),
        mla=mla,
        moe=read_grouped_moe(path, raw, glm=architecture == "glm_moe_dsa"),
        mixed=grouped_moe_layers(path, raw, num_layers),
        scheme=read_scheme(path, raw),
    )


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Parse the metadata of a GGUF file; raises StartupError. The presence of tensors shows biases and tying."""
    path, raw, tensors = file.path, file.metadata, file.tensors
    if file.architecture not in GGUF_ARCHITECTURES:
        raise unsupported_gguf(path, file.architecture)
    architecture = cast(DenseArchitecture, file.architecture)
    if raw.get("split.count", 1) not in (0, 1):
        raise StartupError(f"{path}: one of several GGUF files of a split model; merge them: llama-gguf-split --merge")

    if raw.get(f"{architecture}.expert_count"):
        raise StartupError(
            f"{path}: a mixture of experts; of GGUF files only models without experts are supported: give --model the "
            "Hugging Face directory instead"
        )

    def field(key: str, default: int | None = None) -> int:
        return integer(path, raw, f"{architecture}.{key}", default)

    hidden, heads = field("embedding_length"), field("attention.head_count")
    kv_heads = field("attention.head_count_kv", heads)
    head_dim = field("attention.key_length", hidden // heads)
    _check_heads(path, heads, kv_heads, head_dim)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{path}: tensor 'token_embd.weight' is missing")
    rope = read_gguf_rope(file, architecture, head_dim)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_layers=field("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_length(rope, field("context_length")),
        norm_eps=number(path, raw, f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=architecture == "qwen3",
        dtype=_GGUF_DTYPES.get(embedding.type_name, "bfloat16"),
        eos_token_ids=gguf_end_tokens(file),
    )
    _check_size(path, config)
    return config


# Types of unquantised files. Quantised ones use bfloat16, whose range is sufficient for all of them.
_GGUF_DTYPES: dict[str, DtypeName] = {"F32": "float32", "F16": "float16"}


def _hf_architecture(path: Path, raw: Json) -> Architecture:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StartupError(f"{path}: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and raw.get("model_type") in ARCHITECTURES.values():
        return cast(Architecture, raw["model_type"])
    found = ", ".join(names) or str(raw.get("model_type", "none"))
    raise StartupError(f"{path}: architecture {bare(found)} is not supported; supported are {', '.join(ARCHITECTURES)}")


def unsupported_gguf(path: Path | str, found: str) -> StartupError:
    supported = ", ".join(GGUF_ARCHITECTURES)
    return StartupError(f"{path}: architecture {bare(found)} is not supported in GGUF files; supported are {supported}")


def _check_heads(path: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise StartupError(
            f"{path}: the number of query heads ({heads}) is not a multiple of the KV heads ({kv_heads})"
        )
    if head_dim % 2:
        raise StartupError(f"{path}: head_dim = {head_dim} must be even, for rotary embeddings")


def _check_activation(path: Path, raw: Json) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise StartupError(f"{path}: hidden_act {shown(raw['hidden_act'])} is not supported; supported is 'silu'")


def _hf_dtype(path: Path, raw: Json) -> DtypeName:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise StartupError(f"{path}: dtype {bare(name)} is not supported; supported are float32, bfloat16, float16")
    return cast(DtypeName, name)
