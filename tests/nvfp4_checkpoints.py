"""Quantises the matrices of a checkpoint to NVFP4, as compressed-tensors and ModelOpt store them.

Follows the definition value by value, and shares no code with the loader.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Nvfp4Method = Literal["compressed-tensors", "modelopt"]
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_KEPT = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")


def pack_nvfp4(directory: Path, method: Nvfp4Method) -> dict[str, torch.Tensor]:
    """Quantise all matrices of layers; returns all tensors of the model, dequantised."""
    path = directory / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    expanded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if tensor.ndim != 2 or name.endswith(_KEPT):
            stored[name] = expanded[name] = tensor
            continue
        groups = torch.unflatten(tensor.float(), 1, (-1, 16))
        factor = tensor.abs().max().float() / (6 * 448)
        scales = (groups.abs().amax(2) / (6 * factor)).to(torch.float8_e4m3fn)
        steps = (scales.float() * factor).unsqueeze(2)
        codes = ((groups / steps).unsqueeze(3) - VALUES).abs().argmin(3).to(torch.uint8).flatten(1)
        expanded[name] = VALUES[codes.int()].mul(steps.expand_as(groups).flatten(1))
        module, packed = name.removesuffix(".weight"), codes[:, ::2] | codes[:, 1::2] << 4
        if method == "modelopt":
            stored |= {name: packed, f"{module}.weight_scale": scales, f"{module}.weight_scale_2": factor}
            stored[f"{module}.input_scale"] = torch.tensor(0.02)
            if "k_proj" in module:
                stored[f"{module}.k_scale"] = torch.tensor(1.5)
        else:
            stored |= {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales}
            stored[f"{module}.weight_global_scale"] = (1 / factor).reshape(1)
            stored[f"{module}.input_global_scale"] = torch.tensor([30.0])
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config(method)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return expanded


def quantization_config(method: Nvfp4Method) -> dict[str, Any]:
    """`quantization_config` as the tools write it."""
    values: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16}
    if method == "modelopt":
        group = {"weights": values | {"dynamic": False}, "input_activations": values | {"dynamic": False}}
        kv_cache = {"dynamic": False, "num_bits": 8, "type": "float"}
        head = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": kv_cache}
        return head | {"config_groups": {"group_0": group | {"targets": ["Linear"]}}, "ignore": ["lm_head"]}
    values |= {"strategy": "tensor_group", "symmetric": True}
    group = {"weights": values | {"dynamic": False}, "input_activations": values | {"dynamic": "local"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group | {"targets": ["Linear"], "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
