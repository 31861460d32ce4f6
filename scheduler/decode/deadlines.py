"""How long a request may stay in each state, and the error after that. Which requests are late for a token, and why."""

import collections
import heapq
import math
from collections.abc import Mapping

from ...common.errors import DeadlineError, RequestError, UnavailableError
from ..chunking.step_rule import LATE_GAPS
from ..messages.counters import FIRST_TOKEN_STAGES
from ..messages.lifecycle import State
from .memory.resources import Resources
from .placement.peers import PrefillPeers
from .placer import Placer
from .requests.request import Prompt, Request
from .rooms.rooms import Rooms

LAST_CHANCE = 0.25
"""A dispatched prompt gets at least this fraction of `queue_timeout_s`, counted from its dispatch, until prefill has to
begin it. Otherwise, under overload, prefill would get only prompts that are about to time out.
"""


class Deadlines:
    """Finds requests whose time is up. Looks at a request when it may be due, not in every turn.

    A request counts once as late for its first token, and once for its first gap that is too long: by more than the
    tenth that the rule for steps allows.
    """

    def __init__(self, resources: Resources, rooms: Rooms, peers: PrefillPeers, placer: Placer) -> None:
        self._limits = resources.limits
        self._counters = resources.counters
        self._queued = rooms.queued
        self._computing = rooms.computing
        self._peers = peers
        self._placer = placer
        self._least_s = LATE_GAPS * rooms.computing.gap_limit_s()
        """No shorter time between two tokens is late, for requests without a limit of their own. Nearly all are: the
        limit itself, which depends on the time of a step, is then not needed.
        """
        self._late_s: float | None = None
        """The limit for the tokens of the last step; None if it was not needed."""
        self._with_prompts: collections.deque[bool] = collections.deque(maxlen=self._limits.stages + 1)
        """Whether each of the last steps computed prompts. The token of a request takes a step in each stage; a step
        that computes prompts may also be between two that have none.
        """
        self._shortest_s = min(
            self._limits.queue_timeout_s, self._limits.prefill_wait_s, self._limits.prefill_timeout_s
        )
        """A deadline that starts after a look at the request passes at least this long after it."""
        self._looks: list[tuple[float, str]] = []
        """A heap: when to look at which request. One that is not the request's in `_look_at` is void."""
        self._look_at: dict[str, float] = {}
        self._resumed_at = -math.inf
        """When this process last continued after it was stopped. Waits for a prefill server count from here: the
        process could not pair while it was stopped.
        """

    def watch(self, request: Request) -> None:
        """Add a request that is new or was queued again."""
        self._look(request.rid, min(self._next(request)[0], request.since + self._shortest_s))

    def resumed(self, now: float) -> None:
        """This process was stopped and continues at `now`."""
        self._resumed_at = now

    def passed(self, requests: Mapping[str, Request], now: float) -> list[tuple[Request, RequestError]]:
        """Those of the open requests that have to end now, with the error for each."""
        ends: list[tuple[Request, RequestError]] = []
        while self._looks and self._looks[0][0] <= now:
            at, rid = heapq.heappop(self._looks)
            if self._look_at.get(rid) != at:
                continue
            del self._look_at[rid]
            if (request := requests.get(rid)) is None:
                continue
            due, field = self._next(request)
            if due <= now:
                ends.append((request, self._error(request, field, now)))
            else:
                self._look(rid, min(due, now + self._shortest_s))
        return ends

    def _look(self, rid: str, at: float) -> None:
        if at < self._look_at.get(rid, math.inf):
            self._look_at[rid] = at
            heapq.heappush(self._looks, (at, rid))

    def _next(self, request: Request) -> tuple[float, str]:
        """The next deadline of a request in its present state, and the setting that it comes from."""
        limits, since, prompt = self._limits, request.since, request.prompt
        ends = [(request.deadline, "request_timeout_s")]
        match request.state:
            case State.PREFILLING:
                ends.append((since + limits.prefill_timeout_s, "prefill_timeout_s"))
            case State.QUEUED if self._placer.can_compute(prompt):
                pass  # it needs no prefill server
            case State.QUEUED if (lost_at := self._peers.absent_since(prompt.endpoint)) is not None:
                waits_since = max(since, lost_at, prompt.moved_at, self._resumed_at)
                ends.append((waits_since + limits.prefill_wait_s, "prefill_wait_s"))
            case State.QUEUED if prompt.refused_since is not None:
                ends.append((max(prompt.refused_since, self._resumed_at) + limits.prefill_wait_s, "prefill_wait_s"))
        # not for a retracted request (it has output): it has no queue timeout if its KV is saved, so none here either
        if request.waits_for_prefill and not request.output_ids:
            sent = request.state not in (State.COMPILING, State.QUEUED)
            sent_in_time = since + LAST_CHANCE * limits.queue_timeout_s if sent else since
            ends.append((max(prompt.waits_since + limits.queue_timeout_s, sent_in_time), "queue_timeout_s"))
        return min(ends)

    def _too_long_here(self, prompt: Prompt) -> str:
        """Why this server does not compute the prompt itself; empty if it computes no prompts at all."""
        most = self._placer.largest_local
        if not most:
            return ""
        if prompt.tokens <= most:
            samples = len(prompt.waiting)
            return f"this server's KV pool does not hold the prompt and {samples} samples while it computes them"
        pool = "hot pool" if self._limits.window is None else "KV pool"
        return f"this server computes prompts of up to {most:.0f} tokens ({pool}), and this one has {prompt.tokens}"

    def _error(self, request: Request, field: str, now: float) -> RequestError:
        limits, prompt = self._limits, request.prompt
        match field:
            case "prefill_timeout_s":
                return DeadlineError(f"prefill did not send all KV within {limits.prefill_timeout_s:g} s ({field})")
            case "prefill_wait_s":
                where = f" at {prompt.endpoint}" if prompt.endpoint else ""
                absent = self._peers.absent_since(prompt.endpoint) is not None
                known = [
                    prompt.last_problem,
                    self._peers.describe_absence(prompt.endpoint) if absent else "",
                    self._too_long_here(prompt),
                ]
                why = "; ".join(filter(None, known))
                what = "is paired" if absent else "takes the request"
                return UnavailableError(
                    f"no prefill server{where} {what}; waited {limits.prefill_wait_s:g} s ({field})"
                    + (f": {why}" if why else ""),
                    retry_after_s=1,
                )
            case "queue_timeout_s" if request.state is State.COMPILING:
                return UnavailableError(
                    f"its grammar was not compiled within {limits.queue_timeout_s:g} s ({field})", retry_after_s=1
                )
            case "queue_timeout_s":
                busy = request.state is not State.QUEUED or self._queued.pace.is_busy(prompt.endpoint)
                waited = f"{limits.queue_timeout_s:g} s ({field})"
                return UnavailableError(
                    f"prefill did not start the prompt within {waited}"
                    if busy
                    else f"no KV memory became free within {waited}",
                    retry_after_s=max(1.0, self._placer.expected_wait_s(now)),
                )
            case _:
                given_s = request.deadline - request.started
                own = given_s < limits.request_timeout_s and not math.isclose(given_s, limits.request_timeout_s)
                return DeadlineError(
                    f"not finished within its deadline of {given_s:g} s ({'timeout_s' if own else field})"
                )

    def step_ended(self, *, prompts: bool) -> None:
        """A step has ended, whose tokens follow. It computed `prompts` too."""
        self._with_prompts.append(prompts)
        self._late_s = None

    def token(self, request: Request, now: float) -> None:
        """The request has its next token."""
        before, request.token_at = request.token_at, now
        if before is None:
            limit_s = request.slo_ttft_s or self._limits.slo_ttft_s
            if now - request.started > limit_s:
                stages = request.timeline(now)
                self._counters["late_first_token_" + max(FIRST_TOKEN_STAGES, key=stages.__getitem__)] += 1
            return
        least_s = self._least_s if request.slo_itl_s is None else LATE_GAPS * request.slo_itl_s
        if now - before <= least_s or request.had_late_gap:
            return
        if self._late_s is None:
            self._late_s = LATE_GAPS * self._computing.gap_limit_s()
        if request.slo_itl_s is not None or now - before > self._late_s:
            request.had_late_gap = True
            self._counters["late_gap_" + self._cause_of_gap(request, before, now)] += 1

    def _cause_of_gap(self, request: Request, before: float, now: float) -> str:
        if request.since > before:  # it did not run all the time
            return "retracted" if request.timeline(now)["retracted"] else "admit"
        if request.masked_output == len(request.output_ids) - 1:
            return "grammar"
        return "prompts" if any(self._with_prompts) else "steps"
