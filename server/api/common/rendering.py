"""The base of what writes responses in the shape of one route."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from .outputs import Delta, Output


class Rendering(ABC):
    """Writes the outputs of one call."""

    named_events: ClassVar[bool] = False
    """True: events of a stream are named by their `type`, and nothing follows the last one. False: they have no name,
    and `[DONE]` follows the last one.
    """

    @abstractmethod
    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:
        """The events of a stream for what is new of one output."""

    def closing_events(self, outputs: Sequence[Output]) -> Sequence[object]:  # noqa: ARG002 (subclasses use it)
        """The events after all outputs have ended."""
        return ()

    @abstractmethod
    def result(self, outputs: Sequence[Output]) -> object:
        """The whole response, as JSON."""
