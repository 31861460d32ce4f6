"""Ports that a server is about to take: a mistake is one line with the flag to change, before anything is loaded."""

import errno
import socket

from ..configs.errors import StartupError


def listen_on(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket; raises StartupError, which names `flag`. The caller closes it."""
    return _bind(host, port, flag, listen=True)


def check_port(host: str, port: int, flag: str) -> None:
    """Raise StartupError when another process could not bind this port now. Clients see nothing of it."""
    _bind(host, port, flag, listen=False).close()


def _bind(host: str, port: int, flag: str, *, listen: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"host {host} is not an address of this machine: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        if listen:
            bound.listen()
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another with {flag}") from None
        raise StartupError(f"cannot bind port {port} on {host}: {error.strerror}") from None
    return bound
