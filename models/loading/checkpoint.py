"""The interface of checkpoints."""

from collections.abc import Mapping
from typing import Protocol

from ..decoders.slots import Slot


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names, whatever the file calls them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read_into(self, name: str, slot: Slot) -> None:
        """Fill the slot, whose `shape` is the tensor's, converted to its dtype and device. Reads only that part."""
