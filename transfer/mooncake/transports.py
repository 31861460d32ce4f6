"""Which transports a pair can use: RDMA between HCAs, CUDA IPC ("nvlink") between GPUs of one machine, TCP everywhere.

There is a list for each (prefill rank, decode rank, pool), best first. `auto` has RDMA where both ranks have an HCA,
nvlink where both pools are on GPUs of one machine, and TCP. Host memory never goes over nvlink. Which of them works is
found out at pairing (`probe.py`); the sender takes the first that does.

RDMA has not been run on hardware by this project: tests see what Mooncake is told, not what an HCA makes of it.
"""

import hashlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...configs.errors import StartupError
from ...configs.schema import ServerConfig, TransportSetting
from ..protocol.messages import Pool, Rank
from .engine import ReceiveEngine
from .infiniband import SYSFS, devices_for_rank
from .library import Transport
from .sockets import Region

log = logging.getLogger(__name__)


_REMEDIES: dict[Transport, str] = {
    "nvlink": "CUDA IPC needs both servers in one PID namespace (containers: pid: host and ipc: host) and each other's "
    "GPUs visible (CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES)",
    "rdma": "check that the HCAs reach each other (ib_device, ib_gid_index) and, for KV on GPUs, nvidia-peermem",
}


class KvRoute(NamedTuple):
    """How to reach a pool of a decode rank."""

    transport: Transport
    session: str


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """What this rank may use: the setting, the address peers reach it at, and its HCAs (none: no RDMA)."""

    setting: TransportSetting
    host: str
    rdma_devices: tuple[str, ...] = ()
    gid_index: int | None = None


def resolve_transport(config: ServerConfig, local_rank: int, *, sysfs: Path = SYSFS) -> LocalTransport:
    """The settings of the rank on GPU `local_rank` of this machine, with its HCAs.

    Raises StartupError when `ib_device` names what the machine does not have, and when there is no HCA for `rdma`.
    """
    if config.transport not in ("auto", "rdma"):
        return LocalTransport(config.transport, config.public_host)
    devices = devices_for_rank(config.ib_device, local_rank, sysfs=sysfs)
    if config.transport == "rdma" and not devices:
        raise StartupError(
            "transport rdma needs an InfiniBand or RoCE device with an active port; this machine has none: use "
            "--transport auto"
        )
    return LocalTransport(config.transport, config.public_host, devices, config.ib_gid_index)


def drop_unusable_rdma(local: LocalTransport, memory: Sequence[Region]) -> LocalTransport:
    """The same without RDMA where an RDMA engine cannot be started or cannot register this memory.

    GPU memory, for one, needs a kernel module. Costs a registration; raises StartupError when the setting is `rdma`.
    """
    if not local.rdma_devices:
        return local
    engine = open_receiver("rdma", local, memory)
    if engine is None:
        return replace(local, rdma_devices=())
    engine.close()
    return local


def open_receiver(transport: Transport, local: LocalTransport, memory: Sequence[Region]) -> ReceiveEngine | None:
    """A receive engine with this memory registered.

    Where that cannot be had it is a StartupError if it is what the setting asks for, else None: a Mooncake wheel
    without CUDA IPC, or an HCA that cannot reach GPU memory, leaves the other transports.
    """
    receiver: ReceiveEngine | None = None
    try:
        receiver = ReceiveEngine(local.host, transport=transport, devices=local.rdma_devices, gid_index=local.gid_index)
        for region in memory:
            receiver.register(region.addr, region.length)
    except StartupError as error:
        if receiver is not None:
            receiver.close()
        if transport in (local.setting, "tcp"):
            raise
        log.warning("KV does not travel over %s here: %s", transport, error)
        return None
    return receiver


def machine_id() -> str:
    """The same for all processes of one machine between two boots, containers included."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def possible_routes(local: LocalTransport, destination: Rank, pool: Pool, *, on_gpu: bool) -> tuple[KvRoute, ...]:
    """How this prefill rank may write into a pool of that decode rank, best first; `on_gpu` says where its own pool is.

    A transport that is set is the only one where it is possible at all.
    """
    assert destination.session is not None, "decode announced no session; pairing should have refused it"
    routes: list[KvRoute] = []
    if local.setting in ("auto", "rdma") and local.rdma_devices and destination.rdma_session is not None:
        routes.append(KvRoute("rdma", destination.rdma_session))
    between_gpus = on_gpu and pool.memory == "device" and destination.machine == machine_id()
    if local.setting in ("auto", "nvlink") and between_gpus and destination.nvlink_session is not None:
        routes.append(KvRoute("nvlink", destination.nvlink_session))
    if local.setting in ("auto", "tcp") or not routes:
        routes.append(KvRoute("tcp", destination.session))
    return tuple(routes)


def remedy(transport: Transport) -> str:
    """What to look at where this transport should work and does not."""
    return _REMEDIES.get(transport, "")


def describe_transport_mismatch(setting: TransportSetting, prefill: Rank, decode: Rank) -> str | None:
    """One sentence when prefill is told to use one transport only and this decode rank cannot be reached that way."""
    ranks = f"prefill rank {prefill.rank} is set to transport {setting} and decode rank {decode.rank}"
    if setting == "rdma" and decode.rdma_session is None:
        return f"{ranks} has no RDMA session: its machine has no active HCA, or its own transport is another"
    if setting == "nvlink" and prefill.machine != decode.machine:
        return f"{ranks} is on another machine"
    if setting == "nvlink" and decode.nvlink_session is None:
        return f"{ranks} has no nvlink session: its pool is not on a GPU, or its own transport is another"
    return None
