"""Lines of `--log-requests`: how each request ended, and the time of each stage. They contain no prompts or outputs.

Error messages of refused requests are left out: they quote a field, which may contain a part of a prompt.
"""

from starlette.requests import Request

from ...common.words import counted, shortened, shown
from ...scheduler.messages.frontend import Failed, Finished
from .request_ids import client_request_id

SHORTEST_SHOWN_S = 0.0005
"""Shorter stages would be shown as 0.000 and are left out."""


def request_name(rid: str, request_id: str | None) -> str:
    """The name of a request in the log: its `rid` and the client's `X-Request-Id`, if any."""
    return f"request {rid}" if request_id is None else f"request {rid} (X-Request-Id {request_id})"


def end_line(end: Finished | Failed, elapsed_s: float, request_id: str | None = None) -> str:
    """The line of a request that the engine has ended."""
    name = request_name(end.rid, request_id)
    if isinstance(end, Failed):
        return f"{name}: {end.status} {end.code} after {elapsed_s:.3f} s: {end.message}"
    stages = [f"{stage} {seconds:.3f}" for stage, seconds in end.timeline.items() if seconds >= SHORTEST_SHOWN_S]
    path = f", KV {end.kv_path}" if end.kv_path else ""
    return (
        f"{name}: {end.reason.type}, {counted(end.prompt_tokens, 'prompt token')} ({end.cached_tokens} cached), "
        f"{end.completion_tokens} new in {elapsed_s:.3f} s ({', '.join(stages)}){path}"
    )


def leg_line(rid: str, prompt_tokens: int, room: int | None, request_id: str | None) -> str:
    """The line of a body that a router has sent to a prefill server."""
    return (
        f"{request_name(rid, request_id)}: {counted(prompt_tokens, 'prompt token')} in room {room}, for a decode server"
    )


def refusal_line(request: Request, status: int, code: str, param: str | None = None) -> str:
    """The line of a refused request; `param` is the wrong field."""
    client = "unknown" if request.client is None else f"{request.client.host}:{request.client.port}"
    # the client chooses both, so the path stays percent-encoded and the field is JSON: no line breaks
    path = request.scope["raw_path"].decode("ascii")
    field = "" if param is None else f" for {shown(param)}"
    request_id = client_request_id(request.scope)
    named = "" if request_id is None else f" (X-Request-Id {request_id})"
    return f"{request.method} {shortened(path)} from {client}{named}: {status} {code}{field}"
