"""Where and how `latent_write` stores the indexer's key."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyWrite:
    """Norm and destination of the indexer's key, the last part of x; see latent_write.py."""

    norm: torch.Tensor
    bias: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    interleaved: bool
    scales: torch.Tensor | None = None
    """[pages, page_size] float32, if keys are stored in fp8 (fp8_rows.py)."""
