"""Holds requests until the rank that samples has compiled their grammar. Steps never wait for a compiler."""

import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ...configs.sampling import Grammar
from ..messages.ranks import PrepareGrammar

HeldT = TypeVar("HeldT")


class GrammarGate(Generic[HeldT]):
    """Requests that wait for their grammars. `tell` sends a command to the ranks. The rank that samples answers each
    PrepareGrammar with GrammarReady, at once if the grammar is cached.
    """

    def __init__(self, tell: Callable[[PrepareGrammar], None]) -> None:
        self._tell = tell
        self._numbers = itertools.count()
        self._held: dict[int, HeldT] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def __iter__(self) -> Iterator[HeldT]:
        """The items that wait."""
        return iter(self._held.values())

    def hold(self, item: HeldT, grammar: Grammar) -> None:
        number = next(self._numbers)
        self._held[number] = item
        self._tell(PrepareGrammar(number, grammar))

    def ready(self, number: int) -> HeldT | None:
        """The item whose grammar is compiled; None if it was released before."""
        return self._held.pop(number, None)

    def release(self, wanted: Callable[[HeldT], bool] = lambda _: True) -> list[HeldT]:
        """Remove and return the `wanted` items, whether their grammars are compiled or not."""
        numbers = [number for number, item in self._held.items() if wanted(item)]
        return [self._held.pop(number) for number in numbers]
