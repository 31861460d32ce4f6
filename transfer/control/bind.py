"""Binds ZMQ sockets to TCP ports."""

import socket as sockets

import zmq

from ...configs.errors import StartupError


def bind_tcp(socket: "zmq.Socket[bytes]", host: str, port: int, name: str, flag: str) -> int:
    """Bind and return the port, a free one for 0. ZMQ accepts addresses only, so a host name is resolved here. Raises
    StartupError, which names the port and the `flag` that changes it.
    """
    try:
        family, _, _, _, (address, *_) = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"host {host}: cannot be resolved ({error})") from error
    if family == sockets.AF_INET6:
        socket.setsockopt(zmq.IPV6, 1)
        address = f"[{address}]"
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise StartupError(
                f"{name} {port} on {host} is in use: stop the process that uses it or choose another port with {flag}"
            ) from error
        raise StartupError(f"{name} {port} on {host} cannot be bound: {error}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return int(bound.rstrip(b"\0").rpartition(b":")[2])
