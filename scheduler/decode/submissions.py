"""New prompts: accepts or refuses them."""

import collections
import math

import msgspec

from ...common.errors import ClientError, OverloadedError, RequestError, UnavailableError
from ...memory.page_hashes import unpack_hashes
from ..chunking.grammar_queue import GrammarQueue
from ..messages.effects import ConnectPeer, SendToFrontend
from ..messages.frontend import Submit
from .memory.resources import Resources
from .requests.request import Prompt, Request
from .responses import failed, refusal, too_long
from .rooms.batch import RunQueue
from .rooms.dispatcher import PrefillDispatcher
from .transitions import Transitions

MOST_CALLS = 256
"""Most calls to remember: further prompts of a call may arrive after its first one."""


class Submissions:
    """Turns a Submit into requests and a prompt in the queue, or refuses it."""

    def __init__(
        self,
        resources: Resources,
        *,
        dispatcher: PrefillDispatcher,
        run_queue: RunQueue,
        transitions: Transitions,
        compiling: GrammarQueue[Prompt],
    ) -> None:
        self._limits = resources.limits
        self._pages = resources.pages
        self._counters = resources.counters
        self._outbox = resources.outbox
        self._dispatcher = dispatcher
        self._run_queue = run_queue
        self._transitions = transitions
        self._compiling = compiling
        self.accepting = True
        self.calls: collections.OrderedDict[str, bool] = collections.OrderedDict()
        """Whether each of the last calls was accepted, by the rid of its first prompt (`Submit.follows`)."""

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a prompt with all its samples, now or when its grammar is compiled; or refuse it at once."""
        rids = (submit.rid, *submit.more_rids)
        error = self._refusal(submit, now)
        if error is not None:
            self.refuse(submit, error)
            return
        deadline = now + min(submit.timeout_s or math.inf, self._limits.request_timeout_s)
        prompt = Prompt(
            self._dispatcher.next_prompt_id(),
            submit.prompt_ids,
            endpoint=submit.endpoint,
            room=submit.room,
            priority=submit.priority,
            slo_ttft_s=_seconds(submit.slo_ttft_ms),
            page_hashes={size: unpack_hashes(packed) for size, packed in submit.page_hashes.items()},
            now=now,
        )
        prompt.traceparent = submit.traceparent
        requests = [
            Request(
                rid,
                prompt,
                msgspec.structs.replace(submit.sampling, seed=submit.sampling.seed + index),
                deadline=deadline,
                now=now,
                sample=index,
                logprobs=submit.logprobs,
                slo_itl_s=_seconds(submit.slo_itl_ms),
            )
            for index, rid in enumerate(rids)
        ]
        self._counters["requests"] += len(rids)
        self._transitions.submit(requests, now)
        if prompt.endpoint is not None:
            self._outbox.append(ConnectPeer(prompt.endpoint, submit.client))

    def grammar_ready(self, number: int, problem: str | None, now: float, *, slow: bool) -> None:
        """A grammar is compiled: queue its prompt. Or end its requests, because it cannot be. `slow`: its masks are."""
        prompt = self._compiling.take(number)
        if prompt is None:
            return
        for request in prompt.waiting:
            request.slow_masks = slow
        self._transitions.compiled(prompt, now)
        if problem is not None:
            self._transitions.end_all(prompt, ClientError(f"the grammar {problem}"), now)
        else:
            self._check_peers(prompt, now)

    def refuse(self, submit: Submit, error: RequestError) -> None:
        """Refuse a prompt with all its samples."""
        rids = (submit.rid, *submit.more_rids)
        self._counters["requests_refused"] += len(rids)
        self._outbox += [SendToFrontend(failed(rid, error)) for rid in rids]

    def peers_changed(self, now: float) -> None:
        """End queued requests whose prompts none of the paired prefill servers can hold, and those that name several
        servers.
        """
        for prompt in list(self._dispatcher.queue):
            self._check_peers(prompt, now)

    def _check_peers(self, prompt: Prompt, now: float) -> None:
        if (several := self._several_servers(prompt.endpoint)) is not None:
            self._transitions.end_all(prompt, several, now)
            return
        most_tokens = self._dispatcher.largest_prompt(prompt.endpoint)
        if prompt.tokens > most_tokens:
            local = most_tokens == self._dispatcher.largest_local
            error = too_long(prompt.tokens, prompt.output_tokens, most_tokens, local=local, window=self._limits.window)
            self._transitions.end_all(prompt, error, now)

    def _several_servers(self, endpoint: str | None) -> RequestError | None:
        """The error of a request that names an endpoint which stands for several servers. A router that gives a name
        has chosen one server, but not said which.
        """
        servers = self._dispatcher.peers.several_at(endpoint)
        if not servers:
            return None
        return ClientError(
            f"bootstrap_host: {endpoint} stands for {len(servers)} prefill servers: name one of {', '.join(servers)}"
        )

    def _refusal(self, submit: Submit, now: float) -> RequestError | None:
        """The error if this prompt is refused. Prompts that wait for their grammar, retracted requests, and requests
        whose KV is here and that do not run, count as queued. A call with several prompts is accepted as a whole if the
        queue has room for its first prompt: under load, the queue would rarely have room for all of them.
        """
        if not self.accepting:
            return UnavailableError("the server is shutting down")
        if (several := self._several_servers(submit.endpoint)) is not None:
            return several
        prefill_tokens = self._dispatcher.largest_prompt(submit.endpoint)
        error = refusal(
            submit,
            self._transitions.requests,
            self._pages.num_pages,
            prefill_tokens,
            self._limits,
            local=prefill_tokens == self._dispatcher.largest_local,
        )
        if error is not None:
            return error
        without_kv = len(self._compiling) + len(self._dispatcher.queue) + len(self._transitions.retracted)
        waiting = without_kv + self._run_queue.waiting
        room = waiting < self._limits.max_queued_requests
        if submit.follows is None:
            self.calls[submit.rid] = room
            self.calls.move_to_end(submit.rid)
            if len(self.calls) > MOST_CALLS:
                self.calls.popitem(last=False)
        if self.calls.get(submit.follows or submit.rid, room):
            return None
        return OverloadedError(
            f"max_queued_requests: {self._limits.max_queued_requests} prompts are queued already",
            retry_after_s=max(1.0, self._dispatcher.expected_wait_s(now)),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1000 if milliseconds is not None else None
