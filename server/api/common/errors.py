"""Errors as JSON: one shape for every route but Anthropic's."""

from typing_extensions import TypedDict

from ....common.errors import RequestError
from ....scheduler.messages.frontend import Failed


class ErrorObject(TypedDict):
    """The value of `error` in a JSON response or in the last event of a stream."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorReply(TypedDict):
    error: ErrorObject


class EngineError(RequestError):
    """The leader has failed a request."""

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


def request_id_header(rid: str) -> dict[str, str]:
    """Returns the header with the request's id in the log. Without it if the `rid` is not ASCII: headers must be."""
    return {"X-Request-Id": rid} if rid.isascii() else {}


def failure_object(failed: Failed) -> ErrorObject:
    return error_object(failed.status, failed.code, failed.message)
