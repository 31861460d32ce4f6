"""A DNS server on the loopback whose answer changes, as that of a headless Service of Kubernetes does."""

import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

A = 1
NO_ERROR, NO_SUCH_NAME = 0, 3


class NameServer:
    """Knows one name. `addresses` may change at any time; answers must not be cached (TTL 0)."""

    HOST = "127.0.0.153"
    """resolv.conf has no ports: this server has 53, at an address of its own."""

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        self.name = name
        self.addresses = list(addresses)
        self.asked = 0
        self._closing = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self.HOST, 53))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", (self.HOST, 53))
        self._thread.join()
        self._socket.close()

    def launcher(self, folder: Path) -> list[str]:
        """A command that runs another one in a mount namespace where this is the name server."""
        file = folder / "resolv.conf"
        file.write_text(f"nameserver {self.HOST}\noptions timeout:1\n", encoding="utf-8")
        mount = f'mount --bind "{file}" /etc/resolv.conf && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, "sh"]

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            if self._closing:
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        labels, place = [], 12
        while length := query[place]:
            labels.append(query[place + 1 : place + 1 + length].decode())
            place += 1 + length
        question = query[12 : place + 5]
        (kind,) = struct.unpack("!H", query[place + 1 : place + 3])
        known = ".".join(labels) == self.name
        self.asked += known
        addresses = self.addresses if known and kind == A else []
        code = NO_ERROR if known and self.addresses else NO_SUCH_NAME
        header = query[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(addresses), 0, 0)
        records = [
            struct.pack("!HHHIH", 0xC00C, A, 1, 0, 4) + socket.inet_aton(address) for address in addresses
        ]  # 0xC00C: the name of the question
        return header + question + b"".join(records)
