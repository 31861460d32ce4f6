"""The flags of `pdserve store`."""

import argparse
import os
import re
from typing import NamedTuple

from ...common.errors import StartupError
from ...configs.setting_types import MAX_PORT, check_ports
from .ports import free_ports

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SLAB_BYTES = 16 << 20
"""Mooncake divides memory into slabs of this size."""

_ENDPOINT = r"[^\s/,]+:[0-9]{1,5}"
_ENDPOINTS = f"{_ENDPOINT}(,{_ENDPOINT})*"

WILDCARD_HOSTS = ("", "0.0.0.0", "::")


class StoreOptions(NamedTuple):
    memory_bytes: int
    host: str
    port: int
    metrics_port: int
    join: str | None
    parent_pid: int | None
    etcd: str | None = None
    """etcd servers, HOST:PORT[,...], through which several masters replicate their state."""

    @property
    def url(self) -> str:
        """The URL of the store, for `--kv-store`."""
        if self.etcd is not None:
            return f"etcd://{self.etcd}"
        return self.join or f"mooncake://{self.host}:{self.port}"


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", default="4GiB", metavar="SIZE", help="memory to lend: 512MiB, 8GiB (default: 4GiB)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this machine for the servers (default: loopback)"
    )
    parser.add_argument("--port", type=int, default=50051, help="port of the master (default: 50051)")
    parser.add_argument("--metrics-port", type=int, default=50052, help="HTTP port of the master (default: 50052)")
    parser.add_argument("--join", metavar="URL", help="lend memory to this store (as --kv-store) and run no master")
    parser.add_argument(
        "--etcd",
        metavar="HOST:PORT[,...]",
        help="replicate the master: masters with the same etcd servers are one store, and one of them leads",
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help=argparse.SUPPRESS)


def read_store_options(options: argparse.Namespace) -> StoreOptions:
    """Raises StartupError."""
    _check_endpoints(
        "--join",
        options.join,
        rf"mooncake://{_ENDPOINT}|etcd://{_ENDPOINTS}",
        "mooncake://HOST:PORT or etcd://HOST:PORT[,...]",
    )
    _check_endpoints("--etcd", options.etcd, _ENDPOINTS, "HOST:PORT[,HOST:PORT...]")
    for flag, port in (("--port", options.port), ("--metrics-port", options.metrics_port)):
        if not 1 <= port <= MAX_PORT:
            raise StartupError(f"{flag} must be between 1 and {MAX_PORT}, got {port}")
    if options.join is None and options.port == options.metrics_port:
        raise StartupError(f"--port and --metrics-port are both {options.port}: choose different ports")
    if options.host in WILDCARD_HOSTS:
        raise StartupError(
            f"--host {options.host!r} is a wildcard address: give the one at which servers reach this machine"
        )
    if options.etcd is not None and options.join is not None:
        raise StartupError("--join runs no master, and --etcd replicates one: give one of them")
    memory_bytes, machine_bytes = parse_memory(options.memory, "--memory"), _machine_bytes()
    if memory_bytes > machine_bytes:
        raise StartupError(f"--memory {options.memory}: this machine has {machine_bytes / UNITS['GiB']:.1f} GiB")
    return StoreOptions(
        memory_bytes,
        options.host,
        options.port,
        options.metrics_port,
        options.join,
        options.parent_pid,
        options.etcd,
    )


def _check_endpoints(flag: str, value: str | None, pattern: str, form: str) -> None:
    if value is None:
        return
    if not re.fullmatch(pattern, value):
        raise StartupError(f"{flag} {value!r}: give {form}")
    try:
        check_ports(value)
    except ValueError as error:
        raise StartupError(f"{flag}: {error}, got {value!r}") from None


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_memory(text: str, flag: str) -> int:
    """The bytes of a size such as 8GiB, rounded down to whole slabs. Raises StartupError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(MiB|GiB|TiB)", text)
    size = int(float(match[1]) * UNITS[match[2]]) if match is not None else 0
    if size < SLAB_BYTES:
        raise StartupError(f"{flag} {text!r}: give a size of at least 16MiB, such as 512MiB or 8GiB")
    return size // SLAB_BYTES * SLAB_BYTES


def take_local_store(flags: dict[str, str | bool]) -> StoreOptions | None:
    """Returns the options of the store that `pdserve up --kv-store 4GiB` starts on this machine, and replaces the flag
    by the URL of that store. Returns None if the flag is absent or is the URL of a store.
    """
    given = flags.get("kv_store")
    if not isinstance(given, str) or "://" in given:
        return None
    memory = parse_memory(given, "--kv-store")
    port, metrics_port = free_ports(2)
    flags["kv_store"] = f"mooncake://127.0.0.1:{port}"
    return StoreOptions(memory, "127.0.0.1", port, metrics_port, None, None)
