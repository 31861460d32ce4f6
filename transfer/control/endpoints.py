"""The endpoints that a decode server connects to. A host name stands for all its addresses, each tried on its own."""

import ipaddress
import logging
import math
import random
import socket as sockets
import threading
from collections.abc import Callable
from functools import partial

import zmq

from .session import Session, SessionState, Timing
from .wakeup import ConnectionMonitor

logger = logging.getLogger(__name__)

PAIRED = (SessionState.PAIRED, SessionState.ALIAS, SessionState.LOST)
"""States of a connection whose server has paired. A lost server may come back; its PeerClosed follows later."""
SETTLE_S = 1.0
"""How long the first server of a name with several addresses waits for the others before requests may name it."""


class Connection(Session):
    """An established connection to one address."""

    def __init__(self, address: "Address", socket: zmq.Socket[bytes], *, resend_after_s: float, now: float) -> None:
        transmit = partial(socket.send_multipart, flags=zmq.NOBLOCK)
        super().__init__(address.name, transmit, resend_after_s=resend_after_s, now=now)
        self.address = address
        self.socket = socket
        self.state = SessionState.MEETING
        self.hello_at = now

    @property
    def public_name(self) -> str:
        return self.name

    def refused(self, reason: str, retry_at: float) -> None:
        super().refused(reason, retry_at)
        self.address.tried = True
        self.hello_at = retry_at


class Address:
    """One IP address of an endpoint. Every attempt has its own socket, so a connection and its routing id end together.

    `socket` is None between attempts; `connection` is set after the ZMQ handshake.
    """

    def __init__(self, endpoint: "Endpoint", ip: str, *, now: float) -> None:
        self.endpoint = endpoint
        self.ip = ip
        self.label = f"[{ip}]:{endpoint.port}" if ":" in ip else f"{ip}:{endpoint.port}"
        self.name = f"{endpoint.name} at {ip}" if endpoint.is_name else endpoint.name
        """For messages."""
        self.vanished = False
        """The name does not resolve to it any more: it goes when its connection ends."""
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: ConnectionMonitor | None = None
        self.connection: Connection | None = None
        self.tried = False
        """An attempt has failed, or a server has answered."""
        self.attempt_at = now
        self.attempt_ends_at = now
        self.backoff_s = endpoint.timing.reconnect_min_s
        self.failed_handshakes = 0
        self.refused = False
        self.detail: str | None = None

    @property
    def paired(self) -> bool:
        return self.connection is not None and self.connection.state in PAIRED

    @property
    def names(self) -> list[str]:
        """By these, requests may name the server at this address."""
        if not self.endpoint.is_name:
            return [self.endpoint.name]
        return [self.endpoint.name, self.label] if self.endpoint.settled else [self.label]

    def retry_later(self, now: float) -> None:
        self.attempt_at = now + self.backoff_s * random.uniform(0.75, 1.25)
        self.backoff_s = min(2 * self.backoff_s, self.endpoint.timing.reconnect_max_s)


class Endpoint:
    """HOST:PORT as the configuration or a request names it. A host name is looked up again and again."""

    def __init__(self, name: str, *, client: str | None, now: float, timing: Timing) -> None:
        self.name = name
        self.client = client
        """The client whose request named it; None for a configured endpoint, which is never removed."""
        self.timing = timing
        self.wanted_at = now
        self.host, _, self.port = name.rpartition(":")
        self.is_name = not is_ip(self.host)
        self.addresses: dict[str, Address] = {}
        if not self.is_name:
            self.addresses[self.host] = Address(self, self.host, now=now)
        self.problem: str | None = None
        """Why no address is known."""
        self.looking_up = False
        self.lookup_at = now
        self._looked_up_at = -math.inf
        self._lookup_backoff_s = timing.reconnect_min_s
        self.settled = not self.is_name
        """It is known which servers the name stands for."""
        self.settles_at = math.inf

    @property
    def unpaired(self) -> bool:
        """Named by a request, and no server is paired there."""
        return self.client is not None and not any(address.paired for address in self.addresses.values())

    def look_up(self, resolve: Callable[[str], list[str]], found: Callable[[list[str] | None], None]) -> None:
        """Resolve the host name on a thread of its own and call `found` there, with None if that failed. In ZMQ's I/O
        thread, or on a common thread, one slow name server would block all other peers.
        """

        def run() -> None:
            ips: list[str] | None = None
            try:
                ips = resolve(self.host)
            except (OSError, UnicodeError) as error:
                logger.debug("%s cannot be resolved: %s", self.host, error)
            found(ips)

        self.looking_up = True
        threading.Thread(target=run, name="decode-resolve", daemon=True).start()

    def looked_up(self, ips: list[str] | None, now: float) -> None:
        """A lookup has ended. `ips` is None if it failed: addresses that are known stay."""
        self.looking_up = False
        self._looked_up_at = now
        if ips:
            self.problem = None
            self._lookup_backoff_s = self.timing.reconnect_min_s
            self.lookup_at = now + self.timing.lookup_s
            if self.settles_at == math.inf:
                self.settles_at = now + SETTLE_S if len(ips) > 1 else now
            return
        self.problem = f"host name {self.host} cannot be resolved"
        self.lookup_at = now + self._lookup_backoff_s * random.uniform(0.75, 1.25)
        self._lookup_backoff_s = min(2 * self._lookup_backoff_s, 2 * self.timing.lookup_s)

    def look_up_soon(self, now: float) -> None:
        """A connection or an attempt has ended: its server may have a new address."""
        if self.problem is None:
            self.lookup_at = min(self.lookup_at, max(now, self._looked_up_at + self.timing.reconnect_max_s))

    def settles(self, now: float) -> bool:
        """Whether it is known from now on which servers the name stands for: all addresses have answered or failed."""
        tried = all(address.tried for address in self.addresses.values())
        if self.settled or not self.addresses or not (tried or now >= self.settles_at):
            return False
        self.settled = True
        return True


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """The addresses of a host name: those of IPv4, or those of IPv6 if there are no others. Empty if the name does not
    exist or has none; raises OSError if that cannot be found out.
    """
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except sockets.gaierror as error:
        if error.errno in (sockets.EAI_NONAME, sockets.EAI_NODATA):
            return []
        raise
    addresses = sorted({(family, str(address[0])) for family, _, _, _, address in found})
    of_ipv4 = [address for family, address in addresses if family == sockets.AF_INET]
    return of_ipv4 or [address for _, address in addresses]
