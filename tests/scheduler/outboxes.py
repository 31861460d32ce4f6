"""What parts of a scheduler have decided on, for tests without the scheduler."""

from pdserve.scheduler.messages.effects import Effect, Outbox


def take_all(outbox: Outbox) -> list[Effect]:
    """Everything since the last call."""
    effects, outbox[:] = outbox[:], []
    return effects
