"""Interleaved and half-split RoPE, and the factors of YaRN, against transformers."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as reference

from pdserve.kernels.dsa.latent_write import rotate_pairs_reference
from pdserve.models.config.rope import RopeConfig
from pdserve.models.layers.rope import inverse_frequencies, score_factor

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
YARN_CONFIG = RopeConfig("yarn", 10000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=0.707)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotations_equal_transformers(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(9, 3, 16, generator=generator), torch.randn(9, 1, 16, generator=generator)
    angles = torch.rand(9, 8, generator=generator) * 100
    cos, sin = angles.cos(), angles.sin()
    theirs = reference.apply_rotary_pos_emb_interleave if interleaved else reference.apply_rotary_pos_emb
    expected = theirs(query, key, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim=1)
    for x, rotated in zip((query, key), expected, strict=True):
        found = rotate_pairs_reference(
            x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), interleaved=interleaved
        )
        assert found.equal(rotated)


def test_yarn_equals_transformers() -> None:
    config = DeepseekV32Config(qk_rope_head_dim=64, max_position_embeddings=163840, rope_parameters=YARN)
    rotary = reference.DeepseekV32RotaryEmbedding(config)
    frequencies, magnitude = inverse_frequencies(YARN_CONFIG, 64)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(rotary.attention_scaling)
    assert magnitude != 1.0


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (YARN_CONFIG, YARN),
        (RopeConfig("yarn", 10000.0, 40.0, 4096), {**YARN, "mscale_all_dim": 0}),
        (RopeConfig("yarn", 10000.0, 1.0, 4096, mscale_all_dim=1.0), {**YARN, "factor": 1.0}),
        (RopeConfig(), {"rope_type": "default"}),
    ],
    ids=["mscale", "none", "factor-1", "default"],
)
def test_score_factor_equals_transformers(rope: RopeConfig, parameters: dict[str, Any]) -> None:
    assert score_factor(rope) == pytest.approx(reference.yarn_apply_mscale(parameters, 1.0))
    assert (score_factor(rope) > 1.3) == (rope is YARN_CONFIG)
