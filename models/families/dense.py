"""Families with full or windowed attention: what they read from the same fields as Llama. No torch."""

from dataclasses import dataclass
from pathlib import Path

from ...common.errors import StartupError
from ..config.end_tokens import hf_end_tokens
from ..config.model import LLAMA_NAMES, DtypeName, ModelConfig, Names
from ..config.rope import context_length, read_gguf_rope, read_hf_rope
from ..config.windows import WindowRule, Windows, read_windows
from ..formats.gguf_end_tokens import gguf_end_tokens
from ..formats.gguf_file import GgufFile
from ..formats.json_fields import Json, integer, number
from ..weights.schemes import Scheme, read_scheme
from .family import Family, check_activation, read_dtype

WINDOWED = "full, sliding window"
# Types of unquantised files. Quantised ones use bfloat16, whose range is sufficient for all of them.
_GGUF_DTYPES: dict[str, DtypeName] = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, kw_only=True)
class DenseFamily(Family):
    """A family whose layers are those of decoders/dense.py."""

    attention: str = "full"
    default_context: int
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_theta: float = 10_000.0
    default_eps: float = 1e-6
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    o_bias: bool | None = None  # the same
    mlp_bias: bool = False  # whether `mlp_bias` is a field
    qk_norm: bool = False
    windows: WindowRule | None = None
    names: Names = LLAMA_NAMES

    def read(self, path: Path, raw: Json) -> ModelConfig:
        check_activation(path, raw)
        num_layers = integer(path, raw, "num_hidden_layers")
        windows = self.read_windows(path, raw, num_layers)
        heads = integer(path, raw, "num_attention_heads")
        hidden = integer(path, raw, "hidden_size")
        kv_heads = integer(path, raw, "num_key_value_heads", heads)
        head_dim = integer(path, raw, "head_dim", self.default_head_dim or hidden // heads)
        _check_heads(path, heads, kv_heads, head_dim)
        max_positions = integer(path, raw, "max_position_embeddings", self.default_context)
        attention_bias = bool(raw.get("attention_bias", False))
        rope = read_hf_rope(path, raw, max_positions, self.default_theta)
        return ModelConfig(
            architecture=self.name,
            vocab_size=integer(path, raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=integer(path, raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context_length(rope, max_positions),
            norm_eps=number(path, raw, "rms_norm_eps", self.default_eps),
            rope=rope,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if self.qkv_bias is None else self.qkv_bias,
            o_bias=attention_bias if self.o_bias is None else self.o_bias,
            mlp_bias=self.mlp_bias and bool(raw.get("mlp_bias", False)),
            qk_norm=self.qk_norm,
            dtype=read_dtype(path, raw),
            eos_token_ids=hf_end_tokens(path.parent, raw),
            scheme=self.read_scheme(path, raw),
            window=windows.window,
            windowed=windows.windowed,
            names=self.names,
        )

    def read_windows(self, path: Path, raw: Json, num_layers: int) -> Windows:
        return read_windows(path, raw, num_layers, self.windows)

    def read_scheme(self, path: Path, raw: Json) -> Scheme | None:
        return read_scheme(path, raw)

    def read_gguf(self, file: GgufFile) -> ModelConfig:
        """The presence of tensors shows biases and tying."""
        path, raw, tensors = file.path, file.metadata, file.tensors
        if raw.get("split.count", 1) not in (0, 1):
            raise StartupError(
                f"{path}: one of several GGUF files of a split model; merge them: llama-gguf-split --merge"
            )
        if raw.get(f"{self.name}.expert_count"):
            raise StartupError(
                f"{path}: a mixture of experts; of GGUF files only models without experts are supported: give --model "
                "the Hugging Face directory instead"
            )

        def field(key: str, default: int | None = None) -> int:
            return integer(path, raw, f"{self.name}.{key}", default)

        hidden, heads = field("embedding_length"), field("attention.head_count")
        kv_heads = field("attention.head_count_kv", heads)
        head_dim = field("attention.key_length", hidden // heads)
        _check_heads(path, heads, kv_heads, head_dim)
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise StartupError(f"{path}: tensor 'token_embd.weight' is missing")
        rope = read_gguf_rope(file, self.name, head_dim)
        return ModelConfig(
            architecture=self.name,
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=field("feed_forward_length"),
            num_layers=field("block_count"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context_length(rope, field("context_length")),
            norm_eps=number(path, raw, f"{self.name}.attention.layer_norm_rms_epsilon", 1e-6),
            rope=rope,
            tied_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm=self.qk_norm,
            dtype=_GGUF_DTYPES.get(embedding.type_name, "bfloat16"),
            eos_token_ids=gguf_end_tokens(file),
        )


def _check_heads(path: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise StartupError(
            f"{path}: the number of query heads ({heads}) is not a multiple of the KV heads ({kv_heads})"
        )
    if head_dim % 2:
        raise StartupError(f"{path}: head_dim = {head_dim} must be even, for rotary embeddings")
