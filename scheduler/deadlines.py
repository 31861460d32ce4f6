"""How long a request may stay in each state, and what it is told when it stayed too long."""

from ..configs.errors import DeadlineError, RequestError, UnavailableError
from .intake import Intake
from .lifecycle import State
from .request import Request


def overdue(request: Request, intake: Intake, now: float) -> RequestError | None:
    """The error of a request whose time is up, in its present state or altogether; None while it is not."""
    if now >= request.deadline:
        return DeadlineError(f"not finished after {now - request.life.started:.1f} s, its deadline")
    limits, prompt = intake.limits, request.prompt
    waited_s = now - request.life.since
    match request.state:
        case State.PREFILLING if waited_s >= limits.prefill_timeout_s:
            return DeadlineError(f"prefill did not deliver within {limits.prefill_timeout_s:g} s (prefill_timeout_s)")
        case State.QUEUED if intake.peers.choose(prompt) is None and waited_s >= limits.prefill_wait_s:
            where = f" at {prompt.endpoint}" if prompt.endpoint else ""
            why = f": {prompt.last_problem}" if prompt.last_problem else ""
            return UnavailableError(
                f"no prefill server{where} is paired; waited {limits.prefill_wait_s:g} s (prefill_wait_s){why}",
                retry_after_s=1,
            )
        case State.QUEUED if waited_s >= limits.queue_timeout_s:
            return UnavailableError(
                f"no KV memory became free within {limits.queue_timeout_s:g} s (queue_timeout_s)", retry_after_s=1
            )
        case _:
            return None
