"""The exceptions that a user can see: client errors (4xx) and server errors (5xx).

A message names the field, the limit and the value given. `StartupError` ends a command with one line and exit code 2.
"""


class PdserveError(Exception):
    """Base class of all exceptions that pdserve raises on purpose."""


class StartupError(PdserveError):
    """The server cannot start with this configuration; the message names what to change."""


class RequestError(PdserveError):
    """A request ended without a result. `status` is the HTTP status, `code` a stable machine-readable word."""

    status = 500
    code = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientError(RequestError):
    """The request is invalid, too large, or was aborted by the client."""

    status = 400
    code = "invalid_request"


class TooLargeError(ClientError):
    status = 413
    code = "too_large"


class DuplicateRequestError(ClientError):
    status = 409
    code = "duplicate_rid"


class UnauthorizedError(ClientError):
    status = 401
    code = "unauthorized"


class ForbiddenError(ClientError):
    status = 403
    code = "forbidden"


class RoleConflictError(ClientError):
    """The role of this server cannot change, or cannot change now."""

    status = 409
    code = "role_conflict"


class OverloadedError(ClientError):
    status = 429
    code = "overloaded"


class GrammarTooComplexError(ClientError):
    """Following the grammar of a request has become too expensive: at its output so far, not when it was compiled."""

    code = "grammar_too_complex"


class AbortedError(ClientError):
    status = 499
    code = "aborted"


class ServerError(RequestError):
    """The request is valid, but this server or its prefill server could not serve it."""


class RoleSwitchError(ServerError):
    """The server could not start in the requested role and has its former role again."""

    code = "role_switch_failed"


class UnavailableError(ServerError):
    status = 503
    code = "unavailable"


class DeadlineError(ServerError):
    status = 504
    code = "deadline"
