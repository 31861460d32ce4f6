"""The options of `pdserve store`."""

import argparse
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from ...common.errors import StartupError
from ...configs.flags import Flag, add_flags, fields_of, from_text, given_flags, read_options
from ...configs.setting_types import Port, check_ports
from .ports import free_ports

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SLAB_BYTES = 16 << 20
"""Mooncake divides memory into slabs of this size."""

_ENDPOINT = r"[^\s/,]+:[0-9]{1,5}"
_ENDPOINTS = f"{_ENDPOINT}(,{_ENDPOINT})*"

WILDCARD_HOSTS = ("", "0.0.0.0", "::")


def _check_endpoints(value: str, pattern: str, form: str) -> str:
    if not re.fullmatch(pattern, value):
        raise ValueError(f"give {form}")
    return check_ports(value)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_memory(text: str, flag: str) -> int:
    """The bytes of a size such as 8GiB, rounded down to whole slabs. Raises StartupError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(MiB|GiB|TiB)", text)
    size = int(float(match[1]) * UNITS[match[2]]) if match is not None else 0
    if size < SLAB_BYTES:
        raise StartupError(f"{flag} {text!r}: give a size of at least 16MiB, such as 512MiB or 8GiB")
    return size // SLAB_BYTES * SLAB_BYTES


_STORE_URL = rf"mooncake://{_ENDPOINT}|etcd://{_ENDPOINTS}"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    memory_bytes: Annotated[
        int,
        from_text(partial(parse_memory, flag="--memory")),
        Flag("--memory", metavar="SIZE", default="4GiB"),
        Field(description="memory to lend: 512MiB, 8GiB"),
    ] = 4 * UNITS["GiB"]
    host: Annotated[str, Field(description="address of this machine for the servers")] = "127.0.0.1"
    port: Annotated[Port, Field(description="port of the master")] = 50051
    metrics_port: Annotated[Port, Field(description="HTTP port of the master")] = 50052
    join: Annotated[
        str | None,
        from_text(partial(_check_endpoints, pattern=_STORE_URL, form="mooncake://HOST:PORT or etcd://HOST:PORT[,...]")),
        Flag(metavar="URL"),
        Field(description="lend memory to this store (as --kv-store) and run no master"),
    ] = None
    etcd: Annotated[
        str | None,
        from_text(partial(_check_endpoints, pattern=_ENDPOINTS, form="HOST:PORT[,HOST:PORT...]")),
        Flag(metavar="HOST:PORT[,...]"),
        Field(
            description="replicate the master: masters with the same etcd servers are one store, and one of them leads"
        ),
    ] = None
    parent_pid: int | None = None

    @property
    def url(self) -> str:
        """The URL of the store, for `--kv-store`."""
        if self.etcd is not None:
            return f"etcd://{self.etcd}"
        return self.join or f"mooncake://{self.host}:{self.port}"


_FLAGS = ("memory_bytes", "host", "port", "metrics_port", "join", "etcd")


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, fields_of(StoreOptions), _FLAGS)
    parser.add_argument("--parent-pid", type=int, metavar="PID", help=argparse.SUPPRESS)


def read_store_options(given: argparse.Namespace) -> StoreOptions:
    """Raises StartupError."""
    flags = given_flags(given, _FLAGS)
    options = read_options(StoreOptions, {**flags, "parent_pid": given.parent_pid})
    if options.join is None and options.port == options.metrics_port:
        raise StartupError(f"--port and --metrics-port are both {options.port}: choose different ports")
    if options.host in WILDCARD_HOSTS:
        raise StartupError(
            f"--host {options.host!r} is a wildcard address: give the one at which servers reach this machine"
        )
    if options.etcd is not None and options.join is not None:
        raise StartupError("--join runs no master, and --etcd replicates one: give one of them")
    if options.memory_bytes > (machine_bytes := _machine_bytes()):
        asked = flags.get("memory_bytes", "4GiB")
        raise StartupError(f"--memory {asked}: this machine has {machine_bytes / UNITS['GiB']:.1f} GiB")
    return options


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
    return StoreOptions(memory, "127.0.0.1", port, metrics_port)
