"""Where `latent_write` puts the indexer's key."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyWrite:
    """What becomes of the indexer's key, the last part of x; see the module docstring."""

    norm: torch.Tensor
    bias: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    interleaved: bool
