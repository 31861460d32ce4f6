"""Clients of KV events that speak ZMTP over plain sockets, so that hundreds of them cost the test little memory."""

import socket
import time

from pdserve.transfer.protocol.zmtp import GREETING, frame_head, ready

FROM_THE_START = bytes(8)


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    client = socket.socket()
    client.bind((host, 0))
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    return client


def shaken(port: int, socket_type: str, host: str = "127.0.0.1") -> socket.socket:
    """A connection after the handshake."""
    client = connect(port, host)
    client.sendall(GREETING + ready(socket_type))
    answer = b""
    while b"READY" not in answer:
        part = client.recv(4096)
        if not part:
            raise ConnectionResetError("closed in the handshake")
        answer += part
    return client


def subscriber(port: int) -> socket.socket:
    client = shaken(port, "SUB")
    client.sendall(frame_head(1) + b"\x01")
    return client


def replay_client(port: int) -> socket.socket:
    client = shaken(port, "DEALER")
    ask(client)
    return client


def ask(client: socket.socket, times: int = 1) -> None:
    """Request all batches."""
    client.sendall((frame_head(0, 1) + frame_head(8) + FROM_THE_START) * times)


def is_closed(client: socket.socket, patience_s: float) -> bool:
    """Whether the other side closes the connection within that time. Reads what arrives."""
    ends_at = time.monotonic() + patience_s
    client.settimeout(0.1)
    while time.monotonic() < ends_at:
        try:
            if not client.recv(1 << 16):
                return True
        except TimeoutError:
            pass
        except ConnectionResetError:
            return True
    return False
