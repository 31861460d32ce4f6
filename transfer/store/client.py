"""The client of Mooncake Store. Runs in a process of its own (`agent.py`): its `setup` holds the GIL for up to 90 s if
the master does not answer, and any call may block for seconds.
"""

import importlib
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ...common.errors import PdserveError
from ..mooncake.confinement import confine_if_local
from ..mooncake.library import create_engine

log = logging.getLogger(__name__)

MASTER_TIMEOUT_S: Final = 1.0
UNREACHABLE: Final = -900
"""Mooncake's code for a master that does not answer. Other codes concern one value, and count as a miss."""


class StoreError(PdserveError):
    """The store cannot be used at present."""


class StoreClient(Protocol):
    """Values by key, moved between the store and this process's staging memory at `offsets`."""

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys are in the store. Raises StoreError."""

    def put(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Store values; False for those that were not accepted. Raises StoreError."""

    def get(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Load values of at most these sizes; returns the bytes of each, 0 if it is not there. Raises StoreError."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove values, as far as the store allows it now."""


class MooncakeClient:
    """A client without memory of its own to lend. `address` and `size_bytes` are the staging memory."""

    def __init__(self, url: str, host: str, address: int, size_bytes: int) -> None:
        """`url` is `mooncake://HOST:PORT` or `etcd://HOST:PORT[,...]`. Raises StoreError."""
        self._address = address
        self._store = connect(url, host, segment_bytes=0)
        if self._store.register_buffer(address, size_bytes) != 0:
            raise StoreError("Mooncake could not register the staging memory")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [status == 1 for status in _checked(self._store.batch_is_exist(list(keys)), "is_exist")]

    def put(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        pointers = [self._address + offset for offset in offsets]
        return [
            status == 0 for status in _checked(self._store.batch_put_from(list(keys), pointers, list(sizes)), "put")
        ]

    def get(self, keys: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        pointers = [self._address + offset for offset in offsets]
        found = _checked(self._store.batch_get_into(list(keys), pointers, list(sizes)), "get")
        return [max(0, status) for status in found]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.remove(key, True)  # without force, values that were just read stay


def connect(url: str, host: str, *, segment_bytes: int) -> Any:
    """A store object of Mooncake that lends `segment_bytes` of memory. Raises StoreError.

    On a loopback host, the ports of its transfer engine accept connections of this machine only.
    """
    _check_reachable(url)
    engine = create_engine(host)
    if (problem := confine_if_local(host, engine.get_rpc_port())) is not None:
        log.warning("the ports of the store client stay reachable from other machines: %s", problem)
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    status = store.setup(
        host, "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master_address(url), engine=engine.get_engine()
    )
    if status != 0:
        raise StoreError(f"Mooncake could not connect to the store {url} (status {status})")
    return store


def master_address(url: str) -> str:
    """What Mooncake calls the address of the master. With etcd, it asks there for the leader of several masters."""
    scheme, _, rest = url.partition("://")
    return rest if scheme == "mooncake" else f"etcd://{rest.replace(',', ';')}"


def endpoints(url: str) -> list[tuple[str, int]]:
    """The masters, or the etcd servers, of a URL."""
    parts = (part.rpartition(":") for part in url.partition("://")[2].split(","))
    return [(host, int(port)) for host, _, port in parts]


def _check_reachable(url: str) -> None:
    problems = []
    for address in endpoints(url):
        try:
            socket.create_connection(address, MASTER_TIMEOUT_S).close()
        except (OSError, UnicodeError) as error:  # the latter: no host can have this name
            problems.append(f"{address[0]}:{address[1]}: {error}")
        else:
            return
    raise StoreError(f"no server of {url} answers ({'; '.join(problems)})")


def _checked(statuses: list[int], call: str) -> list[int]:
    if UNREACHABLE in statuses:
        raise StoreError(f"the master of the store does not answer ({call}: status {UNREACHABLE})")
    return statuses
