"""`X-Request-Id`: the id that a client gives to a request. The response and the log lines of the request have it.

It is not the `rid`: proxies retry a request with the same X-Request-Id, and a `rid` must be unique among open requests.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
LONGEST = 256
TRACE_HEADERS = (b"traceparent", b"tracestate")


def client_request_id(scope: Scope) -> str | None:
    """Returns the client's id; None if there is none, or if it is not fit for a log line."""
    text = Headers(scope=scope).get(HEADER, "")
    return text if 0 < len(text) <= LONGEST and text.isascii() and text.isprintable() else None


def trace_context(scope: Scope) -> dict[str, str]:
    """The headers of W3C trace context that the client has sent."""
    return {str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"] if name in TRACE_HEADERS}


class KeepsRequestIds:
    """Wraps the application and adds the client's `X-Request-Id` to its responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = client_request_id(scope) if scope["type"] == "http" else None
        if given is None:
            await self._app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = given
            await send(message)

        await self._app(scope, receive, send_named)
