"""The largest numbers that config.json and GGUF metadata may have, many times those of known models. No torch.

Memory and time of a start grow with them: a number without a bound could take all of either.
"""

from collections.abc import Mapping

_LAYERS, _HEADS, _WIDTH, _TOKENS = 1 << 10, 1 << 12, 1 << 20, 1 << 27
MOST_INTEGER = 1 << 20
MOST_NUMBER = 1e12
MOST_PARAMETERS = 1 << 47
MOST_EXPERT_MLPS = 1 << 18
"""Experts of all layers: each has matrices of its own."""

MOST: Mapping[str, int] = {
    "num_hidden_layers": _LAYERS,
    "block_count": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "index_n_heads": _HEADS,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "vocab_size": 1 << 24,
    "eos_token_id": 1 << 24,
    "max_position_embeddings": _TOKENS,
    "original_max_position_embeddings": _TOKENS,
    "context_length": _TOKENS,
    "sliding_window": _TOKENS,
    "rope.scaling.original_context_length": _TOKENS,
}
"""By field, in GGUF metadata without the architecture; `MOST_INTEGER` for others."""


def most_of(key: str) -> int:
    return MOST.get(key) or MOST.get(key.partition(".")[2]) or MOST_INTEGER
