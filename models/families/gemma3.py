"""Gemma 3: norms before and after attention and MLP, GELU, and a rope of its own for windowed layers."""

from dataclasses import replace
from pathlib import Path

from ...common.errors import StartupError
from ..config.model import ModelConfig
from ..config.rope import read_hf_rope
from ..config.windows import FULL, SLIDING, Windows, read_alternating_windows
from ..formats.json_fields import Json, integer, number, refuse_others
from ..weights.schemes import Scheme
from .dense import WINDOWED, DenseFamily

_DEFAULT_WINDOW = 4096
_PATTERN = 6
"""By default every sixth layer has full attention."""
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3(DenseFamily):
    def read(self, path: Path, raw: Json) -> ModelConfig:
        """Rope parameters are those of layers with full attention; layers with a window have `local_rope`."""
        supported = {
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
        }
        refuse_others(path, raw, supported)
        rope, local_rope = _ropes(path, raw)
        shared = {"hidden_act": "silu", "rope_scaling": None, "rope_parameters": rope}
        shared |= {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
        config = super().read(path, raw | shared)
        cap = "final_logit_softcapping"
        return replace(
            config,
            local_rope=read_hf_rope(path, {"rope_parameters": local_rope}, config.context_length),
            query_scalar=integer(path, raw, "query_pre_attn_scalar", 256),
            gelu=True,
            post_norms=True,
            norm_offset=1.0,
            float32_norms=True,
            scaled_embedding=True,
            logit_cap=None if raw.get(cap) is None else number(path, raw, cap),
        )

    def read_windows(self, path: Path, raw: Json, num_layers: int) -> Windows:
        period = integer(path, raw, "sliding_window_pattern", _PATTERN)
        return read_alternating_windows(path, raw, num_layers, period=period, default=_DEFAULT_WINDOW)

    def read_scheme(self, path: Path, raw: Json) -> Scheme | None:
        if super().read_scheme(path, raw) is not None:
            raise StartupError(
                f"{path}: quantized weights are not supported for {self.name}; supported are 16 and 32 bits"
            )
        return None


def _ropes(path: Path, raw: Json) -> tuple[Json, Json]:
    """Both spellings: `rope_parameters` by layer type (transformers 5), or a base for each and `rope_scaling`."""
    by_type = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    if FULL in by_type or SLIDING in by_type:
        full = {"rope_theta": _THETA, **by_type.get(FULL, {}), **scaling}
        return full, {"rope_theta": _LOCAL_THETA, **by_type.get(SLIDING, {})}
    scaling = scaling or by_type
    return (
        {"rope_theta": number(path, raw, "rope_theta", _THETA), **scaling},
        {"rope_theta": number(path, raw, "rope_local_base_freq", _LOCAL_THETA)},
    )


GEMMA3 = Gemma3(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    attention=WINDOWED,
    default_context=131072,
    default_head_dim=256,
    qk_norm=True,
    quantized="none",
)
