"""New prompts: which are accepted, and why others are refused."""

import collections
from collections.abc import Mapping

from ...common.errors import (
    ClientError,
    DuplicateRequestError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from ..messages.frontend import Submit
from .memory.request_memory import pages_needed
from .memory.resources import Resources
from .placer import Placer
from .requests.request import Request
from .rooms.rooms import Rooms

MOST_CALLS = 256
"""Most calls to remember: further prompts of a call may arrive after its first one."""


class Submissions:
    """Accepts or refuses; what is accepted is submitted to the transitions."""

    def __init__(self, resources: Resources, rooms: Rooms, placer: Placer, requests: Mapping[str, Request]) -> None:
        """`requests` are the open ones."""
        self._limits = resources.limits
        self._num_pages = resources.allocator.num_pages
        self._rooms = rooms
        self._placer = placer
        self._requests = requests
        self.accepting = True
        self.calls: collections.OrderedDict[str, bool] = collections.OrderedDict()
        """Whether each of the last calls was accepted, by the rid of its first prompt (`Submit.follows`)."""

    def refusal(self, submit: Submit, now: float) -> RequestError | None:
        """The error if this prompt is refused. A call with several prompts is accepted as a whole if the queue has room
        for its first prompt: under load, the queue would rarely have room for all of them.
        """
        if not self.accepting:
            return UnavailableError("the server is shutting down")
        error = self._misfit(submit) or self._placer.refusal(submit.endpoint, len(submit.prompt_ids), 0)
        if error is not None:
            return error
        most = self._limits.max_queued_requests
        room = len(self._requests) < most or self._rooms.queue_length < most
        if submit.follows is None:
            self.calls[submit.rid] = room
            self.calls.move_to_end(submit.rid)
            if len(self.calls) > MOST_CALLS:
                self.calls.popitem(last=False)
        if self.calls.get(submit.follows or submit.rid, room):
            return None
        return OverloadedError(
            f"max_queued_requests: {most} prompts are queued already",
            retry_after_s=max(1.0, self._placer.expected_wait_s(now)),
        )

    def _misfit(self, submit: Submit) -> RequestError | None:
        """The error for a prompt that this server can never hold. If it can compute the longest prompts itself, it
        reserves pages for the whole prompt and its growth, also behind a sliding window.
        """
        limits = self._limits
        rids = (submit.rid, *submit.more_rids)
        for rid in rids:
            if rid in self._requests or rids.count(rid) > 1:
                return DuplicateRequestError(f"rid: {rid!r} is already in use; choose another")
        prompt, new, samples = len(submit.prompt_ids), submit.sampling.max_new_tokens, len(rids)
        if prompt < 1:
            return ClientError("the prompt is empty; give at least 1 token")
        most = prompt + new - 1
        needed = pages_needed(prompt, samples, most, limits.page_size, limits.window)
        if self._placer.largest_prompt(submit.endpoint) == self._placer.largest_local:
            at_first = min(most, prompt + limits.growth_tokens)
            needed = max(needed, pages_needed(prompt, samples, at_first, limits.page_size))
        if needed <= self._num_pages:
            return None
        times = f" for each of {samples} samples" if samples > 1 else ""
        return TooLargeError(
            f"the prompt ({prompt} tokens) and up to {new} new tokens{times} exceed the KV pool of "
            f"{self._num_pages * limits.page_size} tokens"
        )
