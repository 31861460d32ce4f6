"""Binds or checks the ports of a server before anything is loaded; errors name the flag to change."""

import contextlib
import errno
import socket
import time

from ...common.errors import StartupError

PREDECESSOR_S = 4.0
"""How long to wait for a port that the leader of a previous server holds: up to ORPHAN_GRACE_S
(scheduler/engine/leader.py) after its frontend was killed, and a margin.
"""


def listen_on(host: str, port: int, flag: str) -> socket.socket:
    """Returns a listening TCP socket, which the caller closes. Raises a StartupError that names `flag`."""
    return _bind(host, port, flag, listen=True)


def check_port(host: str, port: int, flag: str, *, patience_s: float = 0.0) -> None:
    """Raise StartupError when this port cannot be bound. Waits up to `patience_s` for a port in use to become free.
    Does not listen.
    """
    _bind(host, port, flag, listen=False, patience_s=patience_s).close()


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that are free now; another process may take them before they are used."""
    with contextlib.ExitStack() as bound:
        servers = [bound.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _bind(host: str, port: int, flag: str, *, listen: bool, patience_s: float = 0.0) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"host {host} is not an address of this machine: {error.strerror}") from None
    except UnicodeError as error:  # a part of the name is empty or too long
        raise StartupError(f"host {host} is not an address of this machine: {error}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    ends_at = time.monotonic() + patience_s
    while True:
        try:
            bound.bind(address)
            if listen:
                bound.listen()
            return bound
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < ends_at:
                time.sleep(0.1)
                continue
            bound.close()
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"port {port} on {host} is in use; choose another with {flag}") from None
            raise StartupError(f"cannot bind port {port} on {host}: {error.strerror}") from None
