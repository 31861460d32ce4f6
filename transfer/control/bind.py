"""Binds ZMQ sockets, and sockets of our own, to TCP ports."""

import errno
import socket as sockets

import zmq

from ...common.errors import StartupError


def bind_tcp(socket: "zmq.Socket[bytes]", host: str, port: int, name: str, flag: str) -> int:
    """Bind and return the port, a free one for 0. ZMQ accepts addresses only, so a host name is resolved here. Raises
    StartupError, which names the port and the `flag` that changes it.
    """
    family, (address, *_) = _resolve(host, port)
    if family == sockets.AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)
        address = f"[{address}]"
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        raise _explain(error.errno == zmq.EADDRINUSE, error, host, port, name, flag) from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return int(bound.rstrip(b"\0").rpartition(b":")[2])


def listen_tcp(host: str, port: int, name: str, flag: str, backlog: int) -> sockets.socket:
    """A listening socket that does not block, which the caller closes. Raises StartupError as above."""
    family, address = _resolve(host, port)
    listening = sockets.socket(family, sockets.SOCK_STREAM)
    try:
        listening.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise _explain(error.errno == errno.EADDRINUSE, error, host, port, name, flag) from error
    listening.setblocking(False)
    return listening


def _resolve(host: str, port: int) -> tuple[sockets.AddressFamily, tuple[str, int]]:
    try:
        family, _, _, _, (address, number, *_) = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"host {host}: cannot be resolved ({error})") from error
    return family, (str(address), int(number))


def _explain(in_use: bool, error: Exception, host: str, port: int, name: str, flag: str) -> StartupError:
    if in_use:
        return StartupError(
            f"{name} {port} on {host} is in use: stop the process that uses it or choose another port with {flag}"
        )
    return StartupError(f"{name} {port} on {host} cannot be bound: {error}")
