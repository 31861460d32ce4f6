"""Latent attention (MLA). No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MlaConfig:
    """Attention in the latent space. A query head has `nope_dim` elements without position and `rope_dim` with one."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def latent_dim(self) -> int:
        """Elements of a cache row: the normed latent, then the rotated part of the key."""
        return self.kv_rank + self.rope_dim

    def active_parameters(self, hidden_size: int, num_heads: int, num_layers: int) -> int:
        """Weights of attention, in all layers, that one token is multiplied with."""
        queries = self.q_rank * (hidden_size + num_heads * (self.nope_dim + self.rope_dim))
        keys = hidden_size * self.latent_dim + num_heads * self.kv_rank * (self.nope_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        return num_layers * (queries + keys + output)
