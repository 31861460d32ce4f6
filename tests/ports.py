"""Ports for what tests start."""

import random
import socket

_candidates = list(range(18_000, 32_000))
random.SystemRandom().shuffle(_candidates)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that no other test on this machine gets while this process lives.

    It lies above those that Mooncake takes (15000 to 17000) and below those that the kernel gives to connections (from
    32768): nobody takes it in the meantime. Other workers and other runs find it taken by its name.
    """
    while True:
        port = _candidates.pop()
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0pdserve-test-port-{port}")  # abstract: as far-reaching as a port is
            with socket.create_server(("127.0.0.1", port)):
                name.detach()  # open until this process ends
                return port
        except OSError:
            name.close()
