"""The weights of a decoder as the forward pass wants them: q/k/v in one matrix, gate/up in one matrix.

`slots()` says which part of which tensor each checkpoint tensor fills, so loading needs no second copy of the model. It
is also where sharding will cut: a rank's slots are its layers and its rows of the fused matrices.
"""

from dataclasses import dataclass

import torch

from .config import ModelConfig


@dataclass(frozen=True)
class LayerParameters:
    """One decoder layer. Biases and q/k norms are None where the architecture has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: torch.Tensor  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class DecoderParameters:
    """All weights. `head` is `embedding` itself where the checkpoint ties them."""

    config: ModelConfig
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerParameters, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]

    @staticmethod
    def allocate(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> "DecoderParameters":
        """Uninitialised memory for the whole model."""

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def wide(rows: int, columns: int) -> torch.Tensor:
            # stored [in, out] on CPU, where a few rows times that layout is up to 1.5 times as fast
            return tensor(columns, rows).t() if device.type == "cpu" else tensor(rows, columns)

        def bias(present: bool, size: int) -> torch.Tensor | None:
            return tensor(size) if present else None

        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
        layers = tuple(
            LayerParameters(
                input_norm=tensor(hidden),
                qkv=wide(qkv_size, hidden),
                qkv_bias=bias(config.qkv_bias, qkv_size),
                q_norm=bias(config.qk_norm, config.head_dim),
                k_norm=bias(config.qk_norm, config.head_dim),
                o=tensor(hidden, q_size),
                o_bias=bias(config.o_bias, hidden),
                mlp_norm=tensor(hidden),
                gate_up=wide(2 * intermediate, hidden),
                gate_up_bias=bias(config.mlp_bias, 2 * intermediate),
                down=tensor(hidden, intermediate),
                down_bias=bias(config.mlp_bias, hidden),
            )
            for _ in range(config.num_layers)
        )
        head = wide(config.vocab_size, hidden)
        embedding = head if config.tied_embeddings else tensor(config.vocab_size, hidden)
        return DecoderParameters(config, embedding, layers, tensor(hidden), head)

    def slots(self) -> dict[str, torch.Tensor]:
        """Hugging Face tensor name to the view it fills. Together the views cover every element exactly once."""
        slots = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tied_embeddings:
            slots["lm_head.weight"] = self.head
        q_size = self.config.num_heads * self.config.head_dim
        kv_size = self.config.num_kv_heads * self.config.head_dim
        for index, layer in enumerate(self.layers):
            parts = {
                "input_layernorm.weight": layer.input_norm,
                "self_attn.q_norm.weight": layer.q_norm,
                "self_attn.k_norm.weight": layer.k_norm,
                "self_attn.o_proj.weight": layer.o,
                "self_attn.o_proj.bias": layer.o_bias,
                "post_attention_layernorm.weight": layer.mlp_norm,
                "mlp.down_proj.weight": layer.down,
                "mlp.down_proj.bias": layer.down_bias,
            }
            for kind, qkv, gate_up in (
                ("weight", layer.qkv, layer.gate_up),
                ("bias", layer.qkv_bias, layer.gate_up_bias),
            ):
                if qkv is not None:
                    parts[f"self_attn.q_proj.{kind}"] = qkv[:q_size]
                    parts[f"self_attn.k_proj.{kind}"] = qkv[q_size : q_size + kv_size]
                    parts[f"self_attn.v_proj.{kind}"] = qkv[q_size + kv_size :]
                if gate_up is not None:
                    parts[f"mlp.gate_proj.{kind}"], parts[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
            slots.update({f"model.layers.{index}.{name}": part for name, part in parts.items() if part is not None})
        return slots
