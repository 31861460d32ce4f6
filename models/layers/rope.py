"""Rotary position embedding with the frequency scalings of transformers 5.17 (`modeling_rope_utils`)."""

import math

import torch

from ..config.model import ModelConfig
from ..config.rope import RopeConfig


class Rotary:
    """cos and sin of a batch's positions. Angles are float32 and converted to the model's dtype last.

    On CUDA they come from a table of all positions, one kernel instead of ten; elsewhere they are computed, to save
    memory.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, rope: RopeConfig | None = None
    ) -> None:
        """`rope` is by default that of `config`."""
        frequencies, self._magnitude = inverse_frequencies(rope or config.rope, config.rotary_dim)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype
        self._table: torch.Tensor | None = None
        if device.type == "cuda":
            self._table = torch.stack(self._compute(torch.arange(config.context_length, device=device)), dim=1)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For positions [T]: cos and signed sin, both [T, rotary_dim], as kernels/attention/rope_kv_write.py takes
        them.
        """
        if self._table is None:
            return self._compute(positions)
        cos, signed_sin = self._table[positions].unbind(1)
        return cos, signed_sin

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.unsqueeze(1).to(torch.float32) * self._frequencies
        cos = (angles.cos() * self._magnitude).to(self._dtype)
        sin = (angles.sin() * self._magnitude).to(self._dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def score_factor(rope: RopeConfig) -> float:
    """Factor on the attention scores of DeepSeek models, from Yarn's `mscale_all_dim`."""
    if rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "factors":
            return plain / torch.tensor(rope.factors, dtype=torch.float32), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, head_dim, exponents)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, interpolates between them."""
    assert rope.original_context_length is not None
    original = rope.original_context_length
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / low, plain / rope.factor, plain)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: RopeConfig, head_dim: int, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Keeps dimensions that rotate often in the original context, interpolates slow ones, with a ramp between."""
    assert rope.original_context_length is not None
    original = rope.original_context_length

    def dimension_of(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    spread = rope.theta**exponents
    frequencies = 1.0 / (rope.factor * spread) * (1 - kept) + 1.0 / spread * kept

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, _yarn_magnitude(rope.factor, rope.mscale) / _yarn_magnitude(
            rope.factor, rope.mscale_all_dim
        )
    return frequencies, _yarn_magnitude(rope.factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
