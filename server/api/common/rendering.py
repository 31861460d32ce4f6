"""The base class of renderings, which write outputs in the shape of one route."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from .outputs import Delta, Output


class Rendering(ABC):
    """Writes the outputs of one call."""

    named_events: ClassVar[bool] = False
    """Whether each event of a stream is named by its `type`. If not, `[DONE]` follows the last event."""

    @abstractmethod
    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:
        """The events of a stream for the new part of one output."""

    def closing_events(self, outputs: Sequence[Output]) -> Sequence[object]:  # noqa: ARG002 (subclasses use it)
        """The events after all outputs have ended."""
        return ()

    @abstractmethod
    def result(self, outputs: Sequence[Output]) -> object:
        """The whole response, as JSON."""
