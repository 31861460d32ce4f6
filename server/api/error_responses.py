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


class ErrorHandlers:
    """The exception handlers of one server. Refused requests are counted here, failed ones in
    server/engine/leader_client.py.
    """

    def __init__(self, metrics: Metrics, *, log_requests: bool) -> None:
        self._metrics = metrics
        self._log_requests = log_requests

    def install(self, app: FastAPI) -> None:
        app.add_exception_handler(RequestError, self.on_request_error)
        app.add_exception_handler(HTTPException, self.on_http_error)
        app.add_exception_handler(ClientDisconnect, self.on_disconnect)
        app.add_exception_handler(Exception, self.on_defect)

    async def on_request_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        if not isinstance(error, EngineError):
            self._refused(request, error.status, error.code, getattr(error, "param", None))
        return response_for(error)

    async def on_http_error(self, request: Request, error: Exception) -> Response:
        """Unknown route or method."""
        assert isinstance(error, HTTPException)
        code = HTTP_ERROR_CODES.get(error.status_code, "http_error")
        self._refused(request, error.status_code, code)
        hint = near_path(request.url.path) if error.status_code == 404 else None
        question = "" if hint is None else f"; did you mean {hint}?"
        message = f"{error.detail}: {request.method} {request.url.path}{question}"
        response = error_response(error.status_code, code, message)
        response.headers.update(error.headers or {})  # Allow, with 405
        return response

    async def on_disconnect(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # never sent: the client left before its body was complete

    async def on_defect(self, request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "internal", "internal error; the server's log has the details")

    def _refused(self, request: Request, status: int, code: str, param: str | None = None) -> None:
        self._metrics.request_refused(code)
        if self._log_requests:
            log.info("%s", refusal_line(request, status, code, param))


def near_path(path: str) -> str | None:
    """A similar route: with /v1 before it, or without a trailing slash."""
    near = f"/v1{path}" if f"/v1{path}" in OPENAI_PATHS else path.rstrip("/")
    return near if near not in ("", path) else None
