"""Error responses: one JSON shape for every route, with Retry-After where a retry may succeed."""

import math

from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from ....configs.errors import RequestError
from ....scheduler.messages.frontend import Failed

RETRY_STATUSES = (429, 503)
HOPELESS_STATUSES = (409, 504)
"""OpenAI's clients retry these by default, which cannot succeed: a rid in use, or a deadline that has passed."""

DEFAULT_RETRY_S = 1.0


class ErrorObject(TypedDict):
    """The value of `error` in a JSON response or in the last event of a stream."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorReply(TypedDict):
    error: ErrorObject


class EngineError(RequestError):
    """A request that the leader ended without a result."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, retry_after_s=failed.retry_after_s)
        self.rid = failed.rid
        self.status = failed.status
        self.code = failed.code


def error_object(status: int, code: str, message: str, param: str | None = None) -> ErrorObject:
    if status == 429:
        kind = "rate_limit_error"
    elif status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "code": code, "param": param}


def error_response(
    status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
) -> JSONResponse:
    headers = {}
    if status in RETRY_STATUSES:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s or DEFAULT_RETRY_S)))
    if status in HOPELESS_STATUSES:
        headers["X-Should-Retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 415:
        headers["Accept-Encoding"] = "gzip"
    return JSONResponse({"error": error_object(status, code, message, param)}, status, headers)


def response_for(error: RequestError) -> JSONResponse:
    param = getattr(error, "param", None)
    response = error_response(error.status, error.code, str(error), param, error.retry_after_s)
    if isinstance(error, EngineError):
        response.headers.update(request_id_header(error.rid))
    return response


def request_id_header(rid: str) -> dict[str, str]:
    """The id of the request in the log. A `rid` that is not ASCII cannot be a header."""
    return {"X-Request-Id": rid} if rid.isascii() else {}


def failure_object(failed: Failed) -> ErrorObject:
    return error_object(failed.status, failed.code, failed.message)
