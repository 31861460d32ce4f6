"""Small random checkpoints of every supported model family and weight format, each with transformers' model of it.

Checkpoints for float32 have odd sizes and select some experts and tokens. Checkpoints for bfloat16 have the head sizes
of published models, which fast kernels need, and select all experts and all tokens: rounding could change a selection,
and outputs of different selections cannot be compared.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import (
    load_reference,
    make_checkpoint,
    make_dsa_checkpoint,
    pack_experts,
    quantise_checkpoint,
    reference_logits,
)
from tests.int4_checkpoints import pack_checkpoint
from tests.models.loading.test_row_scaled_checkpoints import quantise_by_row
from tests.nvfp4_checkpoints import pack_nvfp4

Dtype = Literal["float32", "bfloat16"]
Fields = dict[str, Any]

CONTEXT = 512
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""That of Kimi-K2, with a shorter context."""


class Family(NamedTuple):
    """An architecture of checkpoints.py, and fields of its config."""

    architecture: Any
    fields: Fields
    wide: Fields
    """In addition, for bfloat16 and for quantised weights, which need whole groups and blocks on every rank."""
    bfloat16: Fields
    """In addition, for bfloat16."""

    @property
    def latent(self) -> bool:
        return self.architecture in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


WIDE: Fields = {"hidden_size": 256, "intermediate_size": 512}
WIDE_EXPERTS: Fields = WIDE | {"moe_intermediate_size": 256}
WIDE_LATENT: Fields = WIDE_EXPERTS | {"q_lora_rank": 128}
HEADS: Fields = {"head_dim": 64}
LATENT: Fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
ALL_EXPERTS: Fields = {"num_experts_per_tok": 8}
MANY_EXPERTS: Fields = {"n_routed_experts": 32}
"""The kernel that selects experts and sorts tokens at once needs a multiple of 32."""
ALL_OF_MANY: Fields = {"num_experts_per_tok": 32}
ALL_TOKENS: Fields = {"index_topk": CONTEXT, "index_head_dim": 128}

FAMILIES = {
    "llama": Family("llama", {"rope_parameters": LLAMA3_ROPE}, WIDE | HEADS, {}),
    "qwen2": Family("qwen2", {}, WIDE, {}),
    "qwen3": Family("qwen3", {}, WIDE | {"head_dim": 128}, {}),
    "qwen3-moe": Family("qwen3_moe", {"norm_topk_prob": True}, WIDE_EXPERTS | HEADS, ALL_EXPERTS),
    "mistral": Family("mistral", {"sliding_window": 40}, WIDE | HEADS, {}),
    "mixtral": Family("mixtral", {}, WIDE | {"intermediate_size": 256}, ALL_EXPERTS),
    "olmo2": Family("olmo2", {}, WIDE, {}),
    "gemma3": Family("gemma3_text", {}, WIDE | {"head_dim": 256}, {}),
    "gpt-oss": Family("gpt_oss", {}, WIDE | HEADS | {"intermediate_size": 256}, ALL_EXPERTS),
    "deepseek-v3": Family("deepseek_v3", MANY_EXPERTS, WIDE_LATENT, LATENT | ALL_OF_MANY | {"n_group": 1}),
    "kimi-k2": Family(
        "deepseek_v3", MANY_EXPERTS | {"n_group": 1, "rope_parameters": YARN}, WIDE_LATENT, LATENT | ALL_OF_MANY
    ),
    "deepseek-v32": Family("deepseek_v32", {}, WIDE_LATENT, LATENT | ALL_EXPERTS | {"n_group": 1} | ALL_TOKENS),
    "glm-dsa": Family("glm_moe_dsa", {}, WIDE_LATENT, LATENT | ALL_EXPERTS | ALL_TOKENS),
}


def _pack_experts_and_keep_others(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors") | pack_experts(directory)


Quantiser = Callable[[Path], dict[str, torch.Tensor]]
"""Quantises a checkpoint and returns the values that all its tensors have then."""
FORMATS: dict[str, Quantiser] = {
    "fp8-blocks": partial(quantise_checkpoint, block=(128, 128)),
    "fp8-rows": partial(quantise_by_row, method="channel"),
    "fp8-matrices": partial(quantise_by_row, method="tensor"),
    "fp8-fbgemm": partial(quantise_by_row, method="fbgemm"),
    "awq": partial(pack_checkpoint, method="awq", group=128),
    "gptq": partial(pack_checkpoint, method="gptq", group=64),
    "w4a16": partial(pack_checkpoint, method="compressed-tensors", group=128),
    "w4a16-asymmetric": partial(pack_checkpoint, method="compressed-tensors-asymmetric", group=32),
    "int4-experts": partial(pack_checkpoint, method="compressed-tensors", group=32, only=".mlp.experts."),
    "nvfp4": partial(pack_nvfp4, method="modelopt"),
    "nvfp4-packed": partial(pack_nvfp4, method="compressed-tensors"),
    "mxfp4": _pack_experts_and_keep_others,
}


class Checkpoint(NamedTuple):
    directory: Path
    plain: Path
    """The same values, not quantised, in float32."""

    def load_reference(self) -> Any:
        return load_reference(self.plain)


def write_checkpoint(root: Path, family_name: str, format_name: str | None, dtype: Dtype) -> Checkpoint:
    """Write a checkpoint that is to be served in `dtype`, quantised or not."""
    family = FAMILIES[family_name]
    fields: Fields = {"max_position_embeddings": CONTEXT} | family.fields
    if dtype == "bfloat16" or format_name is not None:
        fields |= family.wide
    if dtype == "bfloat16":
        fields |= family.bfloat16
    make = make_dsa_checkpoint if family.latent else make_checkpoint
    checkpoint = Checkpoint(make(root / "model", family.architecture, **fields), root / "plain")
    _make_uneven(checkpoint.directory / "model.safetensors")
    shutil.copytree(checkpoint.directory, checkpoint.plain)
    if format_name is not None:
        values = FORMATS[format_name](checkpoint.directory)
        save_file(values, checkpoint.plain / "model.safetensors", {"format": "pt"})
    if family_name == "kimi-k2":
        path = checkpoint.directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    return checkpoint


def _make_uneven(path: Path) -> None:
    """Multiply blocks of 32 x 32 and of 128 x 128 elements of layers by 1/2, 1 or 2, so that a misplaced scale changes
    the results, and round all values to bfloat16, so that servers have exactly the values of transformers.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and ".layers." in name and not name.endswith("gate.weight"):
            for block in (32, 128):
                rows, columns = (-(-size // block) for size in tensor.shape)
                factors = 2.0 ** torch.randint(-1, 2, (rows, columns), generator=generator) / 1.75**0.5
                wide = factors.repeat_interleave(block, 0).repeat_interleave(block, 1)
                tensor *= wide[: tensor.shape[0], : tensor.shape[1]]
        tensors[name] = tensor.bfloat16().float()
    save_file(tensors, path, {"format": "pt"})


def shift_scales(path: Path) -> int:
    """Move the scales of a quantised checkpoint by one group, row or matrix; returns how many tensors have changed.

    The scale of a whole matrix is doubled instead.
    """
    tensors, changed = load_file(path), 0
    for name, tensor in tensors.items():
        if name.endswith(("scale", "scales", "scale_inv")) and ".input_" not in name:
            groups = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim] > 1, default=0)
            bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            moved = tensor.numel() > 1
            tensors[name] = bits.roll(1, groups).contiguous().view(tensor.dtype) if moved else tensor * 2
            changed += 1
    save_file(tensors, path, {"format": "pt"})
    return changed


def token_gaps(reference: Any, prompt: list[int], output: list[int]) -> list[float]:
    """For each token of an output, how far its logit in transformers is below the largest one: 0 if transformers would
    have chosen it too, after the same tokens.
    """
    steps = reference_logits(reference, prompt + output[:-1])[len(prompt) - 1 :]
    chosen = steps.gather(1, torch.tensor(output, device=steps.device).unsqueeze(1))
    gaps: list[float] = (steps.amax(1, keepdim=True) - chosen).flatten().tolist()
    return gaps


def limit_for(format_name: str | None, dtype: Dtype) -> float:
    """The largest gap that rounding explains: twice the largest error of a logit, for logits around 3.

    Measured on a CPU with the references of the kernels: at most 0.1 in bfloat16, and 0.2 with fp8 weights, because the
    activations of many tokens are quantised too. In float32 only tied logits differ.
    """
    if dtype == "float32":
        return 1e-3
    return 0.4 if format_name is not None and format_name.startswith("fp8") else 0.2
