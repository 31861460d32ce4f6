"""The list of supported model families, for `pdserve models`, `pdserve --help` and docs/models.md. No torch."""

from typing import NamedTuple

from ...models.registry import FAMILIES


class FamilyRow(NamedTuple):
    """A family as lists show it."""

    family: str
    architecture: str
    formats: str
    attention: str


def family_rows() -> list[FamilyRow]:
    """All families, in the order of the registry."""
    return [
        FamilyRow(
            family.name,
            family.architecture,
            "safetensors, GGUF" if family.gguf else "safetensors",
            family.attention,
        )
        for family in FAMILIES
    ]
