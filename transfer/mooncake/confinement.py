"""Keeps the ports of engines closed to other machines: Mooncake takes handshakes and commands from anyone."""

from typing import Final

from ...configs.schema import LOOPBACK_HOSTS
from .sockets import PeerUnreachableError, confine_to_loopback, describe_engine

_ANSWER_S: Final = 1.0


def confine_if_local(host: str, port: int) -> Exception | None:
    """Make our engine at `port` accept only local connections if its host is one of this machine alone. Returns the
    error if that fails.
    """
    return confine(port) if host in LOOPBACK_HOSTS or host.startswith("127.") else None


def confine(port: int) -> Exception | None:
    """Make our engine at `port` accept only local connections. Returns the error if that fails."""
    try:
        data_port = describe_engine(f"127.0.0.1:{port}", _ANSWER_S).tcp_data_port
        confine_to_loopback({port, data_port} if data_port else {port})
    except (OSError, PeerUnreachableError) as error:
        return error
    return None
