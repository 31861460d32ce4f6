"""`/role`: its body and reply, the check of permissions, and the interface of the object that switches roles
(server/launch/role_switch.py).
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

from fastapi import Request
from pydantic import Field
from typing_extensions import TypedDict

from ...common.errors import ForbiddenError
from ...configs.load import Role
from ...configs.schema import AnyServerConfig
from .common.fields import Body, Boolean, FieldError, optional

FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "origin")
"""Headers that show that a request comes from elsewhere although its sender, a proxy or a browser, is on this machine.
"""

SwitchStage = Literal["draining", "starting", "restoring", "done", "failed"]


class RoleBody(Body):
    unknown_fields: ClassVar = "refused"

    role: Literal["prefill", "decode"] = Field(description="The role that the server is to have.")
    settings: dict[str, Any] | None = optional(
        "Settings of this role, by name. Default: those that the server last had in this role."
    )
    drain: Boolean | None = optional("Switch even if requests are open: they get shutdown_timeout_s to finish.")
    wait: Boolean | None = optional("Answer when the switch has ended. `?wait=1` is the same.")


class SwitchReport(TypedDict):
    from_role: Role
    to_role: Role
    stage: Annotated[SwitchStage, Field(description="restoring: the server starts in its former role again.")]
    began_at: Annotated[float, Field(description="Unix time.")]
    ended_at: float | None
    error: Annotated[str | None, Field(description="Why the server could not start in the new role.")]


class RoleReport(TypedDict):
    role: Role
    since: Annotated[float, Field(description="Unix time at which the server was started or got this role.")]
    state: Annotated[str, Field(description="starting, ready, stopping or dead, as in /health.")]
    fixed: Annotated[str | None, Field(description="Why the role of this server cannot change.")]
    switch: Annotated[SwitchReport | None, Field(description="The last role switch.")]


class PendingSwitch(Protocol):
    async def wait(self) -> None:
        """Wait until the server serves in the new role. Raises RoleSwitchError if it does not."""


class RoleControl(Protocol):
    def report(self) -> RoleReport: ...

    def former(self) -> AnyServerConfig | None:
        """The configuration of this server in its other role; None if it never had that role."""

    async def request(self, role: Role, settings: Mapping[str, object], *, drain: bool) -> PendingSwitch | None:
        """Begin a role switch; None if the server has this role already.

        Raises ClientError for settings that cannot work, and RoleConflictError if the role cannot change now.
        """


def check_may_switch(request: Request, config: AnyServerConfig) -> None:
    """Raises ForbiddenError if the server has no API key, unless it was started with allow_role_switch and the client
    is on this machine. If there is a key, the route has checked it already.

    Peer and headers alone prove nothing: a proxy on this machine may pass requests without a trace of its own.
    """
    if config.api_key is not None:
        return
    if not config.allow_role_switch:
        raise ForbiddenError(
            "without an API key the role cannot be changed: start the server with api_key and send it as "
            "'Authorization: Bearer KEY', or start it with allow_role_switch"
        )
    if not _is_loopback(request) or any(name in request.headers for name in FORWARDING_HEADERS):
        raise ForbiddenError(
            "without an API key the role can be changed only from this machine, not through a proxy or a web page: "
            "start the server with api_key and send it as 'Authorization: Bearer KEY'"
        )


def _is_loopback(request: Request) -> bool:
    try:
        address = ipaddress.ip_address(request.client.host if request.client is not None else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def wants_to_wait(request: Request, body: RoleBody) -> bool:
    given = request.query_params.get("wait", "0")
    if given not in ("0", "1", "false", "true"):
        raise FieldError("wait", f"must be 0 or 1, got {given[:20]!r}")
    return body.wait is True or given in ("1", "true")
