"""Ports for servers of tests."""

import random
import socket

_candidates = list(range(18_000, 32_000))
random.SystemRandom().shuffle(_candidates)


def free_port() -> int:
    """A free port of 127.0.0.1 that no other test on this machine gets while this process runs.

    Ports are above those of Mooncake (15000 to 17000) and below those that the kernel gives to connections (from
    32768), so that neither takes the port before it is used. An abstract socket reserves it among test processes.
    """
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    while True:
        first = _candidates.pop()
        if all(_reserve(port) for port in range(first, first + count)):
            return first


def _reserve(port: int) -> bool:
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0pdserve-test-port-{port}")  # abstract: belongs to the network namespace, like a port
        with socket.create_server(("127.0.0.1", port)):
            name.detach()  # open until this process ends
            return True
    except OSError:
        name.close()
        return False
