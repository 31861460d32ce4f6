"""Running requests whose masks are slow: each sits out the steps until the rank that samples has computed its mask."""

import enum
import itertools
from collections.abc import Iterable

from ..messages.effects import Outbox
from ..messages.ranks import DropGrammarState, PrepareMask
from .requests.request import Request


class _Mask(enum.Enum):
    WANTED = enum.auto()
    """When its tokens in flight are known."""
    ASKED = enum.auto()
    READY = enum.auto()


class SlowMasks:
    """The mask of the next token of each such request. It is computed beside the steps, so the other rows of a step do
    not wait for it. Nobody starves: a request is in the next step when its mask is ready.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._next_number = itertools.count()
        self._masks: dict[Request, _Mask] = {}
        self._asked: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """From now on, prepare the masks of a running request."""
        request.slow_masks = True
        self._masks.setdefault(request, _Mask.WANTED)

    def remove(self, request: Request) -> None:
        """It does not run any more. What a rank may still compute for it is not used."""
        if request.grammar_state is not None:
            self._outbox.append(DropGrammarState(request.grammar_state))
        if self._masks.pop(request, None) is _Mask.ASKED:
            self._asked = {number: other for number, other in self._asked.items() if other is not request}

    def able(self, requests: list[Request]) -> list[Request]:
        """Those that do not have to wait for a mask."""
        if not self._masks:
            return requests
        return [request for request in requests if self._masks.get(request, _Mask.READY) is _Mask.READY]

    def stepped(self, batch: Iterable[Request]) -> None:
        """A step has begun, which uses up the masks of its requests."""
        for request in batch if self._masks else ():
            if request in self._masks:
                self._masks[request] = _Mask.WANTED

    def ask(self) -> int:
        """Have the masks computed of all requests whose newest token is known; returns how many."""
        ready = [request for request, mask in self._masks.items() if mask is _Mask.WANTED and not request.in_flight]
        for request in ready:
            number = next(self._next_number)
            self._masks[request], self._asked[number] = _Mask.ASKED, request
            draw = request.draw(len(request.output_ids), joined=request.joined)
            request.joined, request.masked_output = False, len(request.output_ids)
            self._outbox.append(PrepareMask(number, request.output_ids[-1], draw))
        return len(ready)

    def ready(self, number: int, *, slow: bool) -> Request | None:
        """A mask is computed: its request takes part in the next step. If it is not `slow` any more, those after it are
        computed in the steps. None if the request does not run any more.
        """
        request = self._asked.pop(number, None)
        if request is not None and slow:
            self._masks[request] = _Mask.READY
        elif request is not None:
            del self._masks[request]
            request.slow_masks = False
        return request
