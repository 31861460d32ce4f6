"""Quantises the matrices of a checkpoint to 4 bits, as AWQ, GPTQ and compressed-tensors store them.

Every packer follows the definition of its format, value by value, and shares no code with the loader.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Int4Method = Literal["awq", "gptq", "gptq_v2", "compressed-tensors", "compressed-tensors-asymmetric"]
_KEPT = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")


def pack_checkpoint(directory: Path, method: Int4Method, group: int, *, only: str = "") -> dict[str, torch.Tensor]:
    """Quantise all matrices of layers, or those with `only` in their name, with groups of `group` columns or, if it is
    -1, of whole rows. Returns all tensors of the model, dequantised.
    """
    path = directory / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    expanded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if tensor.ndim != 2 or name.endswith(_KEPT) or only not in name:
            stored[name] = expanded[name] = tensor
            continue
        values, scales, zeros = quantise(tensor, tensor.shape[1] if group == -1 else group, method)
        width = tensor.shape[1] // scales.shape[1]
        expanded[name] = (values - zeros.repeat_interleave(width, 1)) * scales.repeat_interleave(width, 1)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": data for part, data in pack(values, scales, zeros, method).items()}
        if method == "gptq" and name.endswith("down_proj.weight"):
            stored[f"{module}.bias"] = torch.zeros(len(tensor))  # as published checkpoints of Qwen have it
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config(method, group)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return expanded


def quantise(tensor: torch.Tensor, group: int, method: Int4Method) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values of 0 to 15, and the scale and the zero point of each group of each row. Zero points are at least 1: the
    first GPTQ format stores them minus 1.
    """
    groups = tensor.view(len(tensor), -1, group)
    if method == "compressed-tensors":
        scales = (groups.abs().amax(2) / 7.5).half().float()
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(2), groups.amax(2)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(1, 15)
    values = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
    return values.view(tensor.shape), scales, zeros


def pack(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, method: Int4Method
) -> dict[str, torch.Tensor]:
    """The tensors of one matrix [out, in]."""
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": words(values.T, 1, order), "qzeros": words(zeros.T, 1, order), "scales": scales.T.half()}
    if method in ("gptq", "gptq_v2"):
        return {
            "qweight": words(values.T, 0),
            "qzeros": words(zeros.T - (1 if method == "gptq" else 0), 1),
            "scales": scales.T.half(),
            "g_idx": (torch.arange(values.shape[1]) // (values.shape[1] // scales.shape[1])).int(),
        }
    parts = {
        "weight_packed": words(values, 1),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(values.shape),
    }
    return parts if method == "compressed-tensors" else parts | {"weight_zero_point": words(zeros, 0)}


def words(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight values along dimension `dim` into one int32; `order` lists them from its lowest bits up."""
    rows = values.to(torch.int64) if dim == 1 else values.T.to(torch.int64)
    packed = sum((rows[:, column::8] * 16**place for place, column in enumerate(order)), torch.tensor(0))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return packed if dim == 1 else packed.T


def quantization_config(method: Int4Method, group: int) -> dict[str, Any]:
    """`quantization_config` as the tools write it."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    if method in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": False,
            "sym": False,
            "checkpoint_format": method,
        }
    weights = {"num_bits": 4, "type": "int", "symmetric": method == "compressed-tensors", "actorder": None}
    weights |= (
        {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
