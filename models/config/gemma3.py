"""What Gemma 3 adds to a dense decoder, from config.json. No torch."""

from dataclasses import dataclass
from pathlib import Path

from ..formats.json_fields import Json, integer, number, refuse_others
from .windows import FULL, SLIDING, Windows, read_alternating_windows

_DEFAULT_WINDOW = 4096
_PATTERN = 6
"""By default every sixth layer has full attention."""
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


@dataclass(frozen=True)
class Gemma3Config:
    """Rope parameters are those of layers with full attention; layers with a window have `local_rope`."""

    windows: Windows
    rope: Json
    local_rope: Json
    query_scalar: int
    logit_cap: float | None


def read_gemma3(path: Path, raw: Json, num_layers: int) -> Gemma3Config:
    """The fields of a `gemma3_text` config.json that other families do not have; raises StartupError."""
    supported = {
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }
    refuse_others(path, raw, supported)
    period = integer(path, raw, "sliding_window_pattern", _PATTERN)
    rope, local_rope = _ropes(path, raw)
    return Gemma3Config(
        windows=read_alternating_windows(path, raw, num_layers, period=period, default=_DEFAULT_WINDOW),
        rope=rope,
        local_rope=local_rope,
        query_scalar=integer(path, raw, "query_pre_attn_scalar", 256),
        logit_cap=None if raw.get("final_logit_softcapping") is None else number(path, raw, "final_logit_softcapping"),
    )


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
