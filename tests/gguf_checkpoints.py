"""Writes tiny checkpoints as GGUF files, like llama.cpp's converter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from tests.checkpoints import load_reference

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def convert(
    directory: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    *,
    others: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **rope: Any,
) -> Any:
    """Write a checkpoint like llama.cpp's converter; returns the transformers model with the rounded weights. Matrices
    have the type `kind`, or that of their module in `others`.
    """
    model = load_reference(directory)
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if (factors := rope.get("factors")) is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    if (scaling := rope.get("linear")) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling)
    writer.add_eos_token_id(config.eos_token_id)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        own_kind = (others or {}).get(name.split(".")[-2], kind)
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else own_kind
        data = quantize(values, stored)
        rounded = dequantize(data, stored).reshape(values.shape)
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            # undone row by row: row 2i of a head was row i of its first half, row 2i + 1 of its second
            order = permute(np.arange(len(rounded)), len(rounded) // head_dim)
            unpermuted = np.empty_like(rounded)
            unpermuted[order] = rounded
            rounded = unpermuted
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(rounded)))
        module, _, suffix = name.rpartition(".")
        block = ""
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            block = f"blk.{number}."
        writer.add_tensor(f"{block}{GGUF_NAMES[module]}.{suffix}", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
