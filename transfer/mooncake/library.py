"""Loads the Mooncake wheel: sets its environment, silences its log, and declares the part of its API that we use.

Mooncake reads its settings from MC_* variables, at import, at every engine and at every write. Only this module sets
them: wrong values are dangerous, see FORBIDDEN. The wheel is imported on first use; a leader that moves no KV never
loads it.

glibc frees the table of variables when a new name needs more room. A thread of native code that reads a variable at
that moment (Mooncake, oneDNN) crashes the process. So processes with engines set all names at their start, before other
threads run (`prepare_environment`). Engines then only change values.

Mooncake logs through glog, directly to file descriptor 2, one or more lines per failed write; even at its highest level
it logs spurious errors. A filter on fd 2 would lose tracebacks and faulthandler output of a crash, so the log is
disabled at its source: libglog is a shared library of the wheel, and its exported `FLAGS_minloglevel` is set to FATAL
after the import (engines do not change it). Fatal messages are still printed. Set MC_LOG_LEVEL (INFO, WARNING, ERROR)
to see Mooncake's log.
"""

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, cast

from ...common.errors import StartupError

log = logging.getLogger(__name__)

Transport = Literal["tcp", "nvlink", "rdma"]
"""TCP sockets, CUDA IPC handles between GPUs of one machine, or RDMA between HCAs. Mooncake chooses the transport of an
engine from the environment when the engine is initialised, so a process may have engines of several transports.
"""

WHEELS: Final = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13")
"""Distributions of Mooncake. All own the import name `mooncake`, so only one may be installed."""
PROGRESS_TIMEOUT_S: Final = 5
"""A receive engine closes a connection on which a write has made no progress for this long: it cannot land later."""
SENDER_TIMEOUT_S: Final = 600
"""Of send engines. For Mooncake, progress is that its socket accepts bytes or the peer answers: on a slow network many
seconds can pass without either while the kernel delivers bytes. The sender watches those instead, and destroys a
stalled engine (sender.py).
"""
TCP_LANES: Final = 4
"""Connections of a send engine to its peer. They are opened one by one, as writes need them."""

SETTINGS: Final = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # without it every write opens a connection, and ports run out
    "MC_TCP_LANES_PER_PEER": str(TCP_LANES),
    "MC_TCP_SLICE_SIZE": str(256 << 10),
    # An overflow of these queues breaks an engine permanently. We stay far below, and still raise the limits.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "MC_TCP_STATUS_TIMEOUT_SEC": str(SENDER_TIMEOUT_S),
    "MC_TRANSFER_TIMEOUT": str(SENDER_TIMEOUT_S),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
}
_PROGRESS_VARIABLE: Final = "MC_TCP_PROGRESS_TIMEOUT_SEC"
_TRANSPORT_VARIABLES: Final[dict[Transport, str]] = {
    "tcp": "MC_FORCE_TCP",
    "nvlink": "MC_INTRANODE_NVLINK",
    "rdma": "MC_FORCE_HCA",  # without it Mooncake silently falls back to TCP if the HCA cannot be opened
}
GID_INDEX_VARIABLE: Final = "MC_GID_INDEX"
FORBIDDEN: Final = (
    "MC_LOG_DIR",  # aborts the process at import
    "MC_TCP_PROTO",  # framing 1 has no acknowledgement: "done" does not mean "in the peer's memory"
    "MC_DISABLE_METACACHE",  # ten times the cost per write
    "MC_USE_IPV6",  # both sides would have to agree
)
_GLOG_LEVEL_SYMBOL: Final = "_ZN3fLI17FLAGS_minloglevelE"
_GLOG_FATAL: Final = 3

_EXTRAS: Final = "pip install 'pdserve[cpu]', 'pdserve[cuda12]' or 'pdserve[cuda13]' (exactly one of them)"
NOT_INSTALLED: Final = f"the Mooncake transfer engine is not installed: {_EXTRAS}"


class MooncakeEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that we use. Calls return 0 for success unless noted otherwise."""

    def initialize(self, local: str, metadata: str, protocol: str, devices: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def get_engine(self) -> object:
        """The engine for `MooncakeDistributedStore.setup`, which shares it."""

    def register_memory(self, address: int, size: int, /) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def transfer_submit_write(self, session: str, source: int, destination: int, size: int, /) -> int:
        """An id (a raw pointer), or 0 when the peer cannot be reached."""

    def transfer_sync_read(self, session: str, destination: int, source: int, size: int, /) -> int:
        """Returns when the bytes have arrived."""

    def transfer_check_status(self, write_id: int, /) -> int:
        """0 pending, 1 done, negative failed. Anything but 0 frees the id."""


class _EngineModule(Protocol):
    def TransferEngine(self) -> MooncakeEngine: ...  # noqa: N802 (their name)


_lock = threading.Lock()
_module: _EngineModule | None = None
_prepared = False


def prepare_environment(gid_index: int | None = None) -> None:
    """Set the variables of engines. Call it before the process has other threads; later calls have no effect.

    `gid_index` is the entry of the GID tables of HCAs, which Mooncake reads once per process.
    """
    global _prepared
    if _prepared:
        return
    _prepared = True
    for name in FORBIDDEN:
        if os.environ.pop(name, None) is not None:
            log.warning("%s is set in the environment and does not work with pdserve: ignored", name)
    os.environ.update(SETTINGS)
    os.environ[_PROGRESS_VARIABLE] = str(SENDER_TIMEOUT_S)
    if gid_index is not None:
        os.environ[GID_INDEX_VARIABLE] = str(gid_index)
    for name in _TRANSPORT_VARIABLES.values():  # makes room for all of them
        os.environ[name] = "1"
    _choose_transport("tcp")


def create_engine(
    local_host: str,
    transport: Transport = "tcp",
    *,
    sends: bool = False,
    devices: Sequence[str] = (),
    gid_index: int | None = None,
) -> MooncakeEngine:
    """A new, initialised engine. Must not be used across fork. Raises StartupError if there is no usable wheel.

    `devices` are the HCAs an RDMA engine may use (default: all); `gid_index` is as for `prepare_environment`.
    """
    with _lock:
        prepare_environment(gid_index)
        _choose_transport(transport)
        _set_value(_PROGRESS_VARIABLE, str(SENDER_TIMEOUT_S if sends else PROGRESS_TIMEOUT_S))
        if transport == "rdma" and gid_index is not None:
            _set_value(GID_INDEX_VARIABLE, str(gid_index))
        module = _load()
        engine = module.TransferEngine()
        # Mooncake ignores the port and the protocol argument; "P2PHANDSHAKE" means no metadata server.
        status = engine.initialize(
            f"{local_host}:0", "P2PHANDSHAKE", transport, ",".join(devices) if transport == "rdma" else ""
        )
    if status != 0:
        named = f" with {', '.join(devices)}" if transport == "rdma" and devices else ""
        raise StartupError(
            f"Mooncake could not start an engine for {transport}{named} on host {local_host} (status {status})"
        )
    return engine


def _choose_transport(transport: Transport) -> None:
    """Mooncake looks which of these variables exist."""
    for other, name in _TRANSPORT_VARIABLES.items():
        if other != transport:
            os.environ.pop(name, None)
    _set_value(_TRANSPORT_VARIABLES[transport], "1")


def _set_value(name: str, value: str) -> None:
    if os.environ.get(name) != value:
        os.environ[name] = value


def _load() -> _EngineModule:
    global _module
    if _module is None:
        _module = _import_engine()
        if "MC_LOG_LEVEL" not in os.environ:
            _silence_glog()
    return _module


def _import_engine() -> _EngineModule:
    try:
        try:
            module = importlib.import_module("mooncake.engine")
        except ModuleNotFoundError:
            raise
        except ImportError:
            # The CUDA wheels need libcudart, which torch brings along and loads.
            importlib.import_module("torch")
            module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        if error.name not in ("mooncake", "mooncake.engine"):
            raise
        raise StartupError(NOT_INSTALLED) from error
    except ImportError as error:
        raise StartupError(
            f"the Mooncake transfer engine does not load on this machine: {error}. It needs libibverbs1, libnuma1 and "
            f"libcurl4; the CUDA wheels also need the NVIDIA driver. To choose another wheel: {_EXTRAS}"
        ) from error
    return cast(_EngineModule, module)


def _silence_glog() -> None:
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libglog" in line}
    for path in sorted(loaded):
        try:
            ctypes.c_int.in_dll(ctypes.CDLL(path), _GLOG_LEVEL_SYMBOL).value = _GLOG_FATAL
        except (OSError, ValueError) as error:
            log.debug("Mooncake's log cannot be disabled: %s", error)
    if not loaded:
        log.debug("Mooncake's log cannot be disabled: its wheel has no libglog")
