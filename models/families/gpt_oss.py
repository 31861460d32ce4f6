"""gpt-oss: alternating windows, a sink per query head, and experts with biases, which may be in MXFP4."""

from dataclasses import replace
from pathlib import Path

from ..config.model import ModelConfig, Names
from ..config.moe import MoeConfig
from ..config.windows import Windows, read_alternating_windows
from ..formats.json_fields import Json, number
from ..weights.schemes import Scheme, read_mxfp4_experts
from .dense import WINDOWED
from .moe import MixtureFamily

_ROPE: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The scaling of a configuration that does not mention one."""


class GptOss(MixtureFamily):
    def read(self, path: Path, raw: Json) -> ModelConfig:
        defaults: Json = {"attention_bias": True, "rope_theta": 150_000.0}
        own: Json = {} if raw.get("rope_scaling") or raw.get("rope_parameters") else {"rope_scaling": _ROPE}
        config = super().read(path, defaults | raw | own)
        return replace(config, mixed=(True,) * config.num_layers, float32_norms=True, sinks=True)

    def read_moe(self, path: Path, raw: Json) -> MoeConfig:
        """Weights are the softmax over the selected experts, which is the normalised softmax over all experts."""
        return replace(super().read_moe(path, raw), biases=True, limit=number(path, raw, "swiglu_limit", 7.0))

    def read_windows(self, path: Path, raw: Json, num_layers: int) -> Windows:
        return read_alternating_windows(path, raw, num_layers)

    def read_scheme(self, path: Path, raw: Json) -> Scheme | None:
        return read_mxfp4_experts(path, raw)


GPT_OSS = GptOss(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    attention=WINDOWED,
    default_context=131072,
    default_head_dim=64,
    default_eps=1e-5,
    expert_size="intermediate_size",
    always_normalised=True,
    names=Names(router="router", stacked=True),
    quantized="MXFP4 experts",
)
