"""Exception handlers of the application: turn errors into responses, count them, and log them with --log-requests."""

import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...configs.errors import RequestError
from ..observability.metrics import Metrics
from ..observability.request_log import refusal_line
from .common.errors import EngineError, error_response, response_for

log = logging.getLogger("pdserve.frontend")

OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models")
HTTP_ERROR_CODES = {404: "not_found", 405: "method_not_allowed"}


def add_error_handlers(app: FastAPI, metrics: Metrics, *, log_requests: bool) -> None:
    """Refused requests are counted here, failed ones in server/engine/leader_client.py."""

    def refused(request: Request, status: int, code: str, param: str | None = None) -> None:
        metrics.request_refused(code)
        if log_requests:
            log.info("%s", refusal_line(request, status, code, param))

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        if not isinstance(error, EngineError):
            refused(request, error.status, error.code, getattr(error, "param", None))
        return response_for(error)

    @app.exception_handler(HTTPException)
    async def on_unknown_route_or_method(request: Request, error: HTTPException) -> Response:
        code = HTTP_ERROR_CODES.get(error.status_code, "http_error")
        refused(request, error.status_code, code)
        hint = near_path(request.url.path) if error.status_code == 404 else None
        question = "" if hint is None else f"; did you mean {hint}?"
        message = f"{error.detail}: {request.method} {request.url.path}{question}"
        response = error_response(error.status_code, code, message)
        response.headers.update(error.headers or {})  # Allow, with 405
        return response

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # never sent: the client left before its body was complete

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "internal", "internal error; the server's log has the details")


def near_path(path: str) -> str | None:
    """A similar route: with /v1 before it, or without a trailing slash."""
    near = f"/v1{path}" if f"/v1{path}" in OPENAI_PATHS else path.rstrip("/")
    return near if near not in ("", path) else None
