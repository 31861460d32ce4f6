"""Operations on Mooncake's TCP sockets from outside of Mooncake: query an engine's description, confine and wake its
listeners, cut and reset its connections.

Every engine opens two listeners on all interfaces, without authentication: one for handshakes (its port is the engine's
address, the *session*) and one for data. The handshake frame is `uint64 length, uint8 type, JSON`; type 1 asks for the
engine's description, which names the data port, the registered regions and the HCAs; type 0 asks for a connection
between two HCAs.
"""

import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from ...common.errors import PdserveError
from ..tcp_info import NO_LINGER, borrowed_socket, tcp_counters

_CONNECT: Final = 0
_DESCRIBE: Final = 1
_HEADER: Final = struct.Struct("<QB")
_REPLY_LIMIT_BYTES: Final = 16 << 20
_IDLE_S: Final = 3600
"""After this time the kernel passes on a connection even if it has no data."""


class PeerUnreachableError(PdserveError):
    """A peer's engine cannot be reached, does not answer, or is not the announced one."""


class Region(msgspec.Struct, frozen=True):
    """Registered memory of an engine."""

    addr: int
    length: int


class Hca(msgspec.Struct, frozen=True):
    """A device of an RDMA engine, and its address."""

    name: str
    gid: str = ""


class EngineDescription(msgspec.Struct, frozen=True):
    """The description that an engine sends of itself; unknown fields are ignored."""

    name: str
    tcp_data_port: int | None = None
    buffers: tuple[Region, ...] = ()
    devices: tuple[Hca, ...] = ()

    def hcas(self) -> str:
        """Its devices with their addresses, for the log. Mooncake uses port 1 of each."""
        return ", ".join(f"{device.name} port 1, GID {device.gid}" for device in self.devices)

    def holds(self, wanted: Region) -> bool:
        return any(
            region.addr <= wanted.addr and wanted.addr + wanted.length <= region.addr + region.length
            for region in self.buffers
        )


_description = msgspec.json.Decoder(EngineDescription)
"""Built on import: senders call `describe_engine` on their own threads, and msgspec crashes the process if two threads
use a Struct type for the first time at once."""


def describe_engine(session: str, timeout_s: float) -> EngineDescription:
    """Ask the engine at `session` (HOST:PORT) for its description, within `timeout_s` overall.

    The kernel of a stopped or hung process accepts connections, but nothing answers, which Mooncake itself notices only
    after 60 s. Raises PeerUnreachableError with a sentence for the operator.
    """
    answer = _ask(session, _DESCRIBE, {}, timeout_s)
    try:
        return _description.decode(answer)
    except msgspec.DecodeError as error:
        raise PeerUnreachableError(f"{session} does not speak Mooncake's handshake: {error}") from error


def end_rdma_connection(session: str, ours: str, theirs: str, timeout_s: float) -> None:
    """Make our engine at `session` give up its RDMA connection from `ours` to `theirs` (ENGINE@DEVICE), in the name of
    the peer: as if the peer had restarted, but with no queue pairs, so that the new connection fails.
    """
    refused = {"local_nic_path": theirs, "peer_nic_path": ours, "qp_num": (), "reply_msg": ""}
    _ask(session, _CONNECT, refused, timeout_s)


def _ask(session: str, kind: int, message: Mapping[str, object], timeout_s: float) -> bytes:
    """Send a handshake message and return the answer. Raises PeerUnreachableError."""
    host, port = split_session(session)
    deadline = time.monotonic() + timeout_s
    content = msgspec.json.encode(message)
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(_HEADER.pack(1 + len(content), kind) + content)
            header = _receive(connection, _HEADER.size, deadline)
            length, answered = _HEADER.unpack(header)
            if answered != kind or not 1 < length <= _REPLY_LIMIT_BYTES:
                raise PeerUnreachableError(f"{session} does not speak Mooncake's handshake")
            return _receive(connection, length - 1, deadline)
    except TimeoutError as error:
        raise PeerUnreachableError(f"decode {session} does not answer (waited {timeout_s:g} s)") from error
    except ConnectionRefusedError as error:
        raise PeerUnreachableError(f"decode {session} refuses connections: no engine listens there") from error
    except (OSError, UnicodeError) as error:  # the latter: no host can have this name
        raise PeerUnreachableError(f"decode {session} cannot be reached: {error}") from error


def split_session(session: str) -> tuple[str, int]:
    """Split HOST:PORT."""
    host, colon, port = session.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise PeerUnreachableError(f"{session!r} is not HOST:PORT")
    return host, int(port)


def confine_to_loopback(ports: set[int]) -> None:
    """Make this process's listeners on `ports` accept only local connections. Raises OSError if not permitted."""
    with _listeners(ports) as listeners:
        for sock in listeners:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        confined = {sock.getsockname()[1] for sock in listeners}
    if confined != ports:
        raise OSError(f"this process has no listeners on ports {sorted(ports - confined)}")


def ignore_idle_connections(port: int) -> None:
    """Make this process's listener on `port` accept a connection only after its peer has sent data.

    Mooncake handles handshakes one after the other, with up to 5 s per connection: a few idle connections would block
    all others. A connection that stalls in the middle of the handshake still does. Raises OSError if there is no such
    listener.
    """
    with _listeners({port}) as listeners:
        for sock in listeners:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _IDLE_S)
    if not listeners:
        raise OSError(f"this process has no listener on port {port}")


def wake_listener(port: int) -> None:
    """End the blocking accept() of this process's listener on `port`, permanently.

    Mooncake's destructor joins a thread that blocks in accept() for up to a second, and holds the GIL meanwhile. Call
    this directly before the destructor: until then the thread spins on the dead socket.
    """
    with _listeners({port}) as listeners:
        for sock in listeners:
            with suppress(OSError):  # already done: another thread has a duplicate of the same listener
                sock.shutdown(socket.SHUT_RDWR)


def cut_connections(session: str) -> int:
    """Shut down every connection of this process to `session`. Returns their number.

    Unblocks a thread that is in a Mooncake handshake with a peer that no longer answers (it would wait 60 s).
    """
    host, port = split_session(session)
    count = 0
    with _own_sockets() as sockets:
        for sock in _connected_to(sockets, addresses_of(host), port):
            with suppress(OSError):  # it has just ended
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def acked_bytes(addresses: Collection[str], data_port: int) -> int | None:
    """Bytes that the peer's kernel has received on this process's connections to `data_port` at one of `addresses`;
    None if the kernel does not provide it.
    """
    try:
        with _own_sockets() as sockets:
            return sum(tcp_counters(sock).acked for sock in _connected_to(sockets, addresses, data_port))
    except OSError:
        return None


def addresses_of(host: str) -> set[str]:
    """The addresses of a host. Raises OSError if the name cannot be resolved."""
    return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def drop_unsent(data_port: int) -> int:
    """Make the kernel drop undelivered bytes when this process closes its connections to `data_port`. Returns the
    number of connections.

    Otherwise the kernel retries: bytes written while the network is down arrive when it is up again, a minute later, in
    memory with a new owner. The host is not checked: its name may not resolve while the network is down, and another
    connection with this port number belongs to an engine for another host.
    """
    count = 0
    with _own_sockets() as sockets:
        for sock in sockets:
            with suppress(OSError):  # not connected, or not any more
                if sock.getpeername()[1] == data_port:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                    count += 1
    return count


def _connected_to(sockets: Iterable[socket.socket], addresses: Collection[str], port: int) -> Iterator[socket.socket]:
    for sock in sockets:
        try:
            address, peer_port = sock.getpeername()[:2]
        except OSError:
            continue  # not connected, or not any more
        if peer_port == port and address.removeprefix("::ffff:") in addresses:
            yield sock


@contextmanager
def _own_sockets() -> Iterator[list[socket.socket]]:
    """Duplicates of all TCP sockets of this process; closing them does not close the originals."""
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed by another thread in the meantime
                if str(entry.readlink()).startswith("socket:"):
                    sock = stack.enter_context(borrowed_socket(int(entry.name)))
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                        sockets.append(sock)
        yield sockets


@contextmanager
def _listeners(ports: set[int]) -> Iterator[list[socket.socket]]:
    """Duplicates of this process's listeners on `ports`."""
    with _own_sockets() as sockets:
        listening = (sock for sock in sockets if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        yield [sock for sock in listening if sock.getsockname()[1] in ports]


def _receive(connection: socket.socket, size_bytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        # after the deadline, what has arrived is still read: this process may have been stopped meanwhile
        connection.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            part = connection.recv(size_bytes - len(received))
        except BlockingIOError:
            raise TimeoutError from None
        if not part:
            raise ConnectionResetError("the connection was closed without an answer")
        received += part
    return bytes(received)
