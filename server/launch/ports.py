"""Ports that a server is about to take: a mistake is one line with the flag to change, before anything is loaded."""

import errno
import socket
import time

from ...configs.errors import StartupError

PREDECESSOR_S = 4.0
"""A leader whose front was killed may have its port for so long (ORPHAN_GRACE_S in scheduler/engine/leader.py), and
some.
"""


def listen_on(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket; raises StartupError, which names `flag`. The caller closes it."""
    return _bind(host, port, flag, listen=True)


def check_port(host: str, port: int, flag: str, *, patience_s: float = 0.0) -> None:
    """Raise StartupError when another process could not bind this port now; one that is in use may become free within
    `patience_s`. Clients see nothing of it.
    """
    _bind(host, port, flag, listen=False, patience_s=patience_s).close()


def _bind(host: str, port: int, flag: str, *, listen: bool, patience_s: float = 0.0) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"host {host} is not an address of this machine: {error.strerror}") from None
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
