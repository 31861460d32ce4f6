"""Requests that wait until the rank that samples has compiled their grammar. Steps never wait for a compiler."""

import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from ...common.sampling import Grammar
from ..messages.effects import Outbox
from ..messages.ranks import DropGrammar, PrepareGrammar

OwnerT = TypeVar("OwnerT")


class GrammarQueue(Generic[OwnerT]):
    """Prompts (decode) or requests (prefill) in the state COMPILING. The rank that samples answers each PrepareGrammar
    with GrammarReady, at once if the grammar is cached.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._next_number = itertools.count()
        self._owners: dict[int, OwnerT] = {}
        self._numbers: dict[OwnerT, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[OwnerT]:
        return iter(self._numbers)

    def __contains__(self, owner: OwnerT) -> bool:
        return owner in self._numbers

    def push(self, owner: OwnerT, grammar: Grammar) -> None:
        """Have the grammar of `owner` compiled."""
        number = self._numbers[owner] = next(self._next_number)
        self._owners[number] = owner
        self._outbox.append(PrepareGrammar(number, grammar))

    def take(self, number: int) -> OwnerT | None:
        """Remove the owner of a grammar that is compiled, or cannot be; None if it was removed before."""
        owner = self._owners.pop(number, None)
        if owner is not None:
            del self._numbers[owner]
        return owner

    def remove(self, owner: OwnerT) -> None:
        """Nobody waits for this grammar any more."""
        number = self._numbers.pop(owner)
        del self._owners[number]
        self._outbox.append(DropGrammar(number))
