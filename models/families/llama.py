"""Llama and its close kin: Mistral, Qwen2, Qwen3."""

from ..config.windows import WindowRule
from .dense import WINDOWED, DenseFamily

LLAMA = DenseFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    default_context=2048,
    mlp_bias=True,
    gguf=True,
    gguf_interleaved=True,
)
MISTRAL = DenseFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    attention=WINDOWED,
    default_context=131072,
    qkv_bias=False,
    o_bias=False,
    windows=WindowRule(everywhere=True, default=4096),
)
QWEN2 = DenseFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    attention=WINDOWED,
    default_context=32768,
    qkv_bias=True,
    o_bias=False,
    windows=WindowRule(switched=True, default=4096),
    gguf=True,
)
QWEN3 = DenseFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    attention=WINDOWED,
    default_context=32768,
    default_head_dim=128,
    qk_norm=True,
    windows=WindowRule(switched=True, default=4096),
    gguf=True,
)
