"""Exception handlers of the application: turn errors into responses, count them, and log them with --log-requests."""

import logging
import math

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ...common.errors import RequestError
from ..observability.metrics import Metrics
from ..observability.request_log import refusal_line
from .anthropic import errors as anthropic
from .common.errors import EngineError, error_object, request_id_header

log = logging.getLogger("pdserve.frontend")

V1_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models")
HTTP_ERROR_CODES = {404: "not_found", 405: "method_not_allowed"}


RETRY_STATUSES = (429, 503)
DEFAULT_RETRY_S = 1.0
HOPELESS_STATUSES = (409, 504)
"""Statuses that OpenAI's clients retry by default although a retry cannot succeed: a rid in use, or a deadline that has
passed. `X-Should-Retry: false` tells them not to."""


def error_response(
    path: str, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> JSONResponse:
    """Returns the response to an error, in the shape that clients of the route `path` expect."""
    headers = {}
    if status in RETRY_STATUSES:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s or DEFAULT_RETRY_S)))
    if status in HOPELESS_STATUSES:
        headers["X-Should-Retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 415:
        headers["Accept-Encoding"] = "gzip"
    if path.startswith(anthropic.PATH):
        return JSONResponse(anthropic.error_body(status, message), status, headers)
    return JSONResponse({"error": error_object(status, code, message, param)}, status, headers)


def response_for(path: str, error: RequestError) -> JSONResponse:
    param = getattr(error, "param", None)
    response = error_response(path, error.status, error.code, str(error), param, error.retry_after_s)
    if isinstance(error, EngineError):
        response.headers.update(request_id_header(error.rid))
    return response


def add_error_handlers(app: FastAPI, metrics: Metrics, *, log_requests: bool) -> None:
    """Adds the handlers. They count requests that were refused; server/engine/leader_client.py counts those that failed
    in the engine.
    """

    def refused(request: Request, status: int, code: str, param: str | None = None) -> None:
        metrics.request_refused(code)
        if log_requests:
            log.info("%s", refusal_line(request, status, code, param))

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        if not isinstance(error, EngineError):
            refused(request, error.status, error.code, getattr(error, "param", None))
        return response_for(request.url.path, error)

    @app.exception_handler(HTTPException)
    async def on_unknown_route_or_method(request: Request, error: HTTPException) -> Response:
        code = HTTP_ERROR_CODES.get(error.status_code, "http_error")
        refused(request, error.status_code, code)
        hint = near_path(request.url.path) if error.status_code == 404 else None
        question = "" if hint is None else f"; did you mean {hint}?"
        message = f"{error.detail}: {request.method} {request.url.path}{question}"
        response = error_response(request.url.path, error.status_code, code, message)
        response.headers.update(error.headers or {})  # Allow, with 405
        return response

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # never sent: the client left before its body was complete

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        message = "internal error; the server's log has the details"
        return error_response(request.url.path, 500, "internal", message)


def near_path(path: str) -> str | None:
    """Returns a route that the client may have meant: `path` with /v1 before it, or without a trailing slash."""
    near = f"/v1{path}" if f"/v1{path}" in V1_PATHS else path.rstrip("/")
    return near if near not in ("", path) else None
