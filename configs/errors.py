"""The exceptions a user can see, in two branches: the client's fault (4xx) and ours (5xx).

A message names the field, the limit and the value given. `StartupError` ends a command with one line and exit code 2.
"""


class PdserveError(Exception):
    """Root of everything pdserve raises on purpose."""


class StartupError(PdserveError):
    """The server cannot start as configured; the message says what to change."""


class RequestError(PdserveError):
    """A request that ends without a result; `status` is its HTTP status and `code` a stable machine-readable word."""

    status = 500
    code = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientError(RequestError):
    """The request is wrong, too large, or was given up by its sender."""

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


class OverloadedError(ClientError):
    status = 429
    code = "overloaded"


class AbortedError(ClientError):
    status = 499
    code = "aborted"


class ServerError(RequestError):
    """The request was right and this server, or the prefill server it depends on, could not serve it."""


class UnavailableError(ServerError):
    status = 503
    code = "unavailable"


class DeadlineError(ServerError):
    status = 504
    code = "deadline"
