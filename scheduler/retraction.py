"""Requests that gave up their device memory: who waits to come back, and what is the cheaper way back."""

import collections
import dataclasses

from .request import Request


@dataclasses.dataclass(slots=True)
class Rates:
    """What was measured of the two ways to bring a retracted request back; None until it was."""

    copied_pages_per_s: float | None = None
    prefilled_tokens_per_s: float | None = None

    def copy_is_cheaper(self, pages: int, tokens: int) -> bool:
        """Out to host memory and back, or computed by prefill. Copying until both are known: it rarely loses."""
        if self.copied_pages_per_s is None or self.prefilled_tokens_per_s is None:
            return True
        return 2 * pages / self.copied_pages_per_s <= tokens / self.prefilled_tokens_per_s


class Retractions:
    """Requests that gave up what they need to run, in the order in which they went: pages that were copied to host
    memory, or (HiSparse) only the hot buffer of KV that is there anyway.
    """

    def __init__(self, most_pages: int) -> None:
        self._most_pages = most_pages
        self._requests: collections.deque[Request] = collections.deque()
        self.rates = Rates()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def saved_pages(self) -> int:
        return sum(request.saved_pages for request in self._requests)

    def worth_saving(self, pages: int, tokens: int) -> bool:
        """Whether to keep a copy: there is room for it, and copying is cheaper than computing the tokens anew."""
        return self.saved_pages + pages <= self._most_pages and self.rates.copy_is_cheaper(pages, tokens)

    def add(self, request: Request, pages: int) -> None:
        request.saved_pages = pages
        self._requests.append(request)

    def first(self) -> Request | None:
        """Who comes back next. One that has kept its pages goes before others, who may lack just those."""
        kept = (request for request in self._requests if request.grant is not None)
        return next(kept, self._requests[0] if self._requests else None)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        request.saved_pages = 0
