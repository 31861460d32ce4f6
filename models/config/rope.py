"""Rotary embeddings, from config.json or GGUF metadata. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...common.errors import StartupError
from ..formats.gguf_file import GgufFile
from ..formats.json_fields import Json, bare, integer, number, refuse_others, shown

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]
_DEFAULT_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_GGUF_DEFAULTS = {
    "attn_factor": 1,
    "yarn_ext_factor": 1,
    "yarn_attn_factor": 1,
    "yarn_beta_fast": 32,
    "yarn_beta_slow": 1,
    "yarn_log_multiplier": 0,
}
"""Fields of GGUF files that llama.cpp computes with, and their values in files without them."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` determines which fields apply; names are those of Hugging Face's `rope_parameters`.

    `factors` (from GGUF files) divide the inverse frequencies one by one. `dynamic` changes the base only beyond the
    context length, where requests end, so here it is the same as `default`.
    """

    kind: RopeKind = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_context_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


def read_hf_rope(path: Path, raw: Json, max_positions: int, default_theta: float = _DEFAULT_THETA) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` beside `rope_scaling` (before)."""
    rope: Json = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if own := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise StartupError(f"{path}: rope parameters of some layers ({bare(own[0])}) are not supported here")
    theta = number(path, rope, "rope_theta", number(path, raw, "rope_theta", default_theta))
    rotary_share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotary_share not in (None, 1, 1.0):
        raise StartupError(f"{path}: partial_rotary_factor {shown(rotary_share)} is not supported; supported is 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = raw.get(_ORIGINAL, rope.get(_ORIGINAL))
    if isinstance(original, float) and original.is_integer():
        original = int(original)
    original_length = integer(path, {_ORIGINAL: original}, _ORIGINAL, max_positions)
    if kind in ("default", None):
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=number(path, rope, "factor"))
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=number(path, rope, "factor"),
            original_context_length=original_length,
            low_freq_factor=number(path, rope, "low_freq_factor"),
            high_freq_factor=number(path, rope, "high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=number(path, rope, "factor", max_positions / original_length),
            original_context_length=original_length,
            attention_factor=_factor(path, rope, "attention_factor"),
            beta_fast=float(_factor(path, rope, "beta_fast") or 32),
            beta_slow=float(_factor(path, rope, "beta_slow") or 1),
            mscale=_factor(path, rope, "mscale"),
            mscale_all_dim=_factor(path, rope, "mscale_all_dim"),
            truncate=bool(rope.get("truncate", True)),
        )
    raise StartupError(
        f"{path}: rope type {shown(kind)} is not supported; supported are default, linear, dynamic, llama3, yarn"
    )


def _factor(path: Path, rope: Json, key: str) -> float | None:
    """A number of at least 0, as it is written; None if there is none. Raises StartupError."""
    value = rope.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise StartupError(f"{path}: {key} must be a number of at least 0, got {shown(value)}")
    if value:
        number(path, rope, key)
    return value


def read_gguf_rope(file: GgufFile, architecture: str, head_dim: int) -> RopeConfig:
    path, raw = file.path, file.metadata
    prefix = f"{architecture}.rope"
    theta = number(path, raw, f"{prefix}.freq_base", _DEFAULT_THETA)
    rotary_dim = integer(path, raw, f"{prefix}.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise StartupError(f"{path}: {prefix}.dimension_count is {rotary_dim}; supported is the head size, {head_dim}")
    scaling = f"{prefix}.scaling"
    supported = {f"{prefix}.scale_linear": 1} | {f"{scaling}.{name}": value for name, value in _GGUF_DEFAULTS.items()}
    refuse_others(path, raw, supported)
    scaled = raw.get(f"{scaling}.factor", 1) not in (0, 1)
    kind = raw.get(f"{scaling}.type", "linear" if scaled else "none")  # as in llama.cpp
    if (table := file.tensors.get("rope_freqs.weight")) is not None:  # how llama3 scaling is stored
        if kind != "none" and scaled:
            raise StartupError(f"{path}: {scaling}.factor is not supported beside the tensor 'rope_freqs.weight'")
        values = np.concatenate([rows.ravel() for _, rows in file.read_rows(table)])
        if values.shape != (head_dim // 2,):
            raise StartupError(f"{path}: tensor 'rope_freqs.weight' has {values.size} values, expected {head_dim // 2}")
        return RopeConfig(kind="factors", theta=theta, factors=tuple(values.tolist()))
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = number(path, raw, f"{scaling}.factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "yarn":
        original = integer(path, raw, f"{scaling}.original_context_length")
        return RopeConfig(kind="yarn", theta=theta, factor=factor, original_context_length=original)
    raise StartupError(f"{path}: {scaling}.type {shown(kind)} is not supported; supported are none, linear, yarn")


def context_length(rope: RopeConfig, max_positions: int) -> int:
    """Yarn checkpoints often have the original training length in max_position_embeddings."""
    if rope.kind == "yarn" and rope.original_context_length is not None:
        return max(max_positions, int(rope.original_context_length * rope.factor))
    return max_positions
