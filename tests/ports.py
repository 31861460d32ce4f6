"""Ports for what tests start."""

import contextlib
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_candidates = list(range(18_000 + _WORKER, 32_000, 16))
random.SystemRandom().shuffle(_candidates)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that no other test of this run gets.

    It lies above those that Mooncake takes (15000 to 17000) and below those that the kernel gives to connections (from
    32768): nobody takes it in the meantime.
    """
    while True:
        port = _candidates.pop()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
