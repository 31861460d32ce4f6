"""OLMo-2: norms after attention and after the MLP instead of before them, and of all queries and all keys together.

    hidden  +=  norm(attention(hidden))      with queries norm(q(hidden)) over all heads, and keys alike
    hidden  +=  norm(mlp(hidden))

With tensor parallelism, ranks add the squares of their heads. cos and sin of rotary embeddings are rounded to the dtype
of the model, as those of other families; transformers keeps them in float32 for this one.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.model import ModelConfig
from ..formats.json_fields import Json
from .dense import DenseFamily

if TYPE_CHECKING:
    import torch

    from ..decoders.rank_memory import RankMemory
    from ..layers.parallel import Parallel


class Olmo2(DenseFamily):
    def read(self, path: Path, raw: Json) -> ModelConfig:
        return replace(super().read(path, raw), pre_norms=False, post_norms=True, float32_norms=True)

    def attention_step(self, memory: "RankMemory[Any]", name: str) -> "NormOfAllHeads":
        return NormOfAllHeads(memory, name)


class NormOfAllHeads:
    """The norms of all queries and of all keys of a layer."""

    def __init__(self, memory: "RankMemory[Any]", name: str) -> None:
        queries, keys = memory.query_rows, memory.key_rows
        self._sizes = [queries.size, keys.size, keys.size]
        self._weights = memory.norm(f"{name}.q_norm", queries), memory.norm(f"{name}.k_norm", keys)
        # elements of all ranks; several ranks may have the same KV heads
        self._counts = [rows.size * memory.shard.attention.tp_size for rows in (queries, keys)]
        self._eps = memory.config.norm_eps

    def __call__(self, qkv: "torch.Tensor", parallel: "Parallel") -> None:
        import torch  # here, because the frontend reads configurations without it

        parts = torch.split(qkv, self._sizes, dim=1)[:2]
        sums = parallel.all_reduce(torch.stack([part.float().square().sum(1) for part in parts]))
        for part, weight, total, count in zip(parts, self._weights, sums, self._counts, strict=True):
            scale = torch.rsqrt(total / count + self._eps).unsqueeze(1)
            part.copy_(part.float().mul_(scale).mul_(weight))


OLMO2 = Olmo2(name="olmo2", architecture="Olmo2ForCausalLM", default_context=2048, default_eps=1e-5)
