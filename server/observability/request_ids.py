"""`X-Request-Id`: the name a client gives to a request. The answer carries it, and so do the log lines of the request.

It is not the `rid`: proxies repeat a request under the same name, and a `rid` is used once at a time.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
LONGEST = 256


def client_request_id(scope: Scope) -> str | None:
    """The name that the client gave; None without one, or with one that does not fit a line of the log."""
    for name, value in scope["headers"]:
        if name == HEADER:
            text = str(value, "latin-1")
            return text if 0 < len(text) <= LONGEST and text.isascii() and text.isprintable() else None
    return None


class KeepsRequestIds:
    """The application with the client's `X-Request-Id` in all its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = client_request_id(scope) if scope["type"] == "http" else None
        if given is None:
            await self._app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != HEADER]
                message["headers"] = [*headers, (HEADER, given.encode())]
            await send(message)

        await self._app(scope, receive, send_named)
