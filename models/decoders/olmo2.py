"""OLMo-2: norms after attention and after the MLP instead of before them, and of all queries and all keys together.

    hidden  +=  norm(attention(hidden))      with queries norm(q(hidden)) over all heads, and keys alike
    hidden  +=  norm(mlp(hidden))

With tensor parallelism, ranks add the squares of their heads.
"""

from dataclasses import dataclass, field, fields

import torch

from ...kernels.linear.rms_norm import rms_norm
from ..layers.batch import ForwardBatch
from .dense import Decoder
from .dense_parameters import DecoderParameters, DenseMemory, LayerParameters

_ABSENT = ("input_layernorm.weight", "pre_feedforward_layernorm.weight")


@dataclass(frozen=True)
class Olmo2LayerParameters(LayerParameters):
    """Without `input_norm` and `mlp_norm`, which are empty."""

    queries_norm: torch.Tensor = field(kw_only=True)  # [heads * head_dim]
    keys_norm: torch.Tensor = field(kw_only=True)  # [kv_heads * head_dim]


class _Memory(DenseMemory):
    def layer(self, index: int) -> Olmo2LayerParameters:
        plain, name, config = super().layer(index), f"model.layers.{index}", self.config
        for norm in _ABSENT:
            del self._tensors[f"{name}.{norm}"]
        shared = {each.name: getattr(plain, each.name) for each in fields(plain)}
        none = torch.empty(0, dtype=self.dtype, device=self.device)
        return Olmo2LayerParameters(
            **shared | {"input_norm": none, "mlp_norm": none},
            queries_norm=self.norm(f"{name}.self_attn.q_norm", self.elements(self.heads, config.num_heads)),
            keys_norm=self.norm(f"{name}.self_attn.k_norm", self.elements(self.kv_heads, config.num_kv_heads)),
        )


class Olmo2Parameters(DecoderParameters):
    memory_type = _Memory


class Olmo2Decoder(Decoder):
    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _project(self, normed: torch.Tensor, layer: LayerParameters) -> torch.Tensor:
        assert isinstance(layer, Olmo2LayerParameters)
        qkv, config = super()._project(normed, layer), self.config
        norms = layer.queries_norm, layer.keys_norm
        first, second = len(norms[0]), len(norms[0]) + len(norms[1])
        parts = qkv[:, :first], qkv[:, first:second]
        # several ranks may have the same KV heads
        copies = len(self.parameters.kv_heads) * self._parallel.shard.attention.tp_size // config.num_kv_heads
        counts = config.num_heads * config.head_dim, copies * config.num_kv_heads * config.head_dim
        squares = torch.stack([part.float().square().sum(1) for part in parts])
        means = self._parallel.all_reduce(squares)
        for part, norm, mean, count in zip(parts, norms, means, counts, strict=True):
            scale = torch.rsqrt(mean / count + config.norm_eps).unsqueeze(1)
            part.copy_(part.float().mul_(scale).mul_(norm))
        return qkv

    def _leave(
        self, index: int, hidden: torch.Tensor, attended: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, eps = self.parameters.layers[index], self.config.norm_eps
        assert layer.attention_post_norm is not None
        assert layer.mlp_post_norm is not None
        hidden = hidden + rms_norm(attended, layer.attention_post_norm, eps)
        hidden = hidden + rms_norm(self._mlps.of_layer(index, hidden, batch.ranks), layer.mlp_post_norm, eps)
        return hidden, hidden
