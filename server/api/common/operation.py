"""The routes of the application as data: with a handler, and models for the documentation."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import ErrorReply

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """One route and method, with the models of its body, its reply (None for plain text), the events of its stream and
    its errors. With `accepts`, the route may answer 202 before it is done.
    """

    method: str
    path: str
    handler: Handler
    body: Any = None
    reply: Any = None
    event: Any = None
    error: Any = ErrorReply
    accepts: bool = False
