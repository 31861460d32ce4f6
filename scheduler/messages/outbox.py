"""The list to which a scheduler and its parts append their effects."""

from .effects import Effect


class Outbox(list[Effect]):
    """The effects that a scheduler has decided on, in order.

    The scheduler creates one and passes it to its parts, so that effects of all parts stay in the order of the
    decisions. A list, because `append` runs once per token.
    """

    def take_all(self) -> list[Effect]:
        """Everything since the last call."""
        effects = self[:]
        self.clear()
        return effects
