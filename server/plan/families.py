"""The list of supported model families, for `pdserve models`, `pdserve --help` and docs/models.md. No torch."""

from typing import NamedTuple

from ...models.config.model import ARCHITECTURES, GGUF_ARCHITECTURES, SPARSE_ARCHITECTURES
from ...models.config.windows import WINDOWED_ARCHITECTURES


class FamilyRow(NamedTuple):
    """A family as lists show it."""

    family: str
    architecture: str
    formats: str
    attention: str


def family_rows() -> list[FamilyRow]:
    """All families, in the order of ARCHITECTURES."""
    return [
        FamilyRow(
            family,
            architecture,
            "safetensors, GGUF" if family in GGUF_ARCHITECTURES else "safetensors",
            _attention(family),
        )
        for architecture, family in ARCHITECTURES.items()
    ]


def _attention(family: str) -> str:
    if family in SPARSE_ARCHITECTURES:
        return "sparse (HiSparse)"
    if family == "deepseek_v3":
        return "latent"
    return "full, sliding window" if family in WINDOWED_ARCHITECTURES else "full"
