"""Which transport a pair uses: TCP everywhere, CUDA IPC ("nvlink") between GPU memory of one machine."""

import hashlib
import socket
from pathlib import Path
from typing import NamedTuple

from ..configs.errors import StartupError
from ..configs.schema import TransportSetting
from .engine import ReceiveEngine
from .messages import Rank
from .mooncake_library import Transport


class KvRoute(NamedTuple):
    """How to reach a decode rank."""

    transport: Transport
    session: str


def machine_id() -> str:
    """The same for all processes of one machine between two boots, containers included."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def open_nvlink_receiver(
    setting: TransportSetting, host: str, address: int, size_bytes: int, *, on_gpu: bool
) -> ReceiveEngine | None:
    """A second receive engine for writes between GPUs of this machine; None where there is no use for it.

    With `auto` a Mooncake wheel without CUDA IPC is fine; with `nvlink` it is a StartupError, as is a pool on the CPU.
    """
    if setting == "tcp" or (setting == "auto" and not on_gpu):
        return None
    if not on_gpu:
        raise StartupError("transport nvlink moves KV between GPUs; the KV pool is in host memory: use --transport tcp")
    try:
        receiver = ReceiveEngine(host, transport="nvlink")
        receiver.register(address, size_bytes)
    except StartupError:
        if setting == "nvlink":
            raise
        return None
    return receiver


def choose_route(setting: TransportSetting, destination: Rank, *, on_gpu: bool) -> KvRoute:
    """How prefill writes to this decode rank; `on_gpu` says where its own pool is."""
    assert destination.session is not None, "decode announced no session; pairing should have refused it"
    same_machine = destination.machine == machine_id()
    if setting != "tcp" and on_gpu and same_machine and destination.nvlink_session is not None:
        return KvRoute("nvlink", destination.nvlink_session)
    return KvRoute("tcp", destination.session)


def describe_transport_mismatch(setting: TransportSetting, prefill: Rank, decode: Rank) -> str | None:
    """One sentence when prefill is told to use nvlink only and this decode server cannot be reached that way."""
    if setting != "nvlink":
        return None
    if prefill.machine != decode.machine:
        return "prefill is set to transport nvlink and decode is on another machine"
    if decode.nvlink_session is None:
        return "prefill is set to transport nvlink and decode receives over tcp only"
    return None
