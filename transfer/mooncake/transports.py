"""The transports of a pair: RDMA between HCAs, CUDA IPC ("nvlink") between GPUs of one machine, TCP everywhere.

Each (prefill rank, decode rank, pool) has a list, best first. `auto` has RDMA if both ranks have an HCA, nvlink if both
pools are on GPUs of one machine, and TCP. Host memory never uses nvlink. At pairing the sender probes them (`probe.py`)
and uses the first that works.

This project has not run RDMA on hardware: `make test-rdma` runs it with SoftRoCE in a virtual machine.
"""

import hashlib
import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ...common.errors import StartupError
from ...configs.schema import ServerConfig
from ...configs.setting_types import TransportSetting
from ..protocol.messages import Pool, Rank
from .engine import ReceiveEngine
from .infiniband import devices_for_rank
from .library import Transport
from .rdma_engine import RdmaEngine
from .sockets import Region

log = logging.getLogger(__name__)


REMEDIES: dict[Transport, str] = {
    "nvlink": "CUDA IPC needs both servers in one PID namespace (containers: pid: host and ipc: host) and each other's "
    "GPUs visible (CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES)",
    "rdma": "check that the HCAs reach each other (ib_device, ib_gid_index) and, for KV on GPUs, nvidia-peermem",
}
"""What to check if a transport does not work."""


class KvRoute(NamedTuple):
    """A transport to a decode rank, and the address of its engine."""

    transport: Transport
    session: str


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """Transport settings of this rank: the setting, the address for peers, and its HCAs (empty: no RDMA). `rdma` is the
    engine of a rank that writes over RDMA.
    """

    setting: TransportSetting
    host: str
    rdma_devices: tuple[str, ...] = ()
    gid_index: int | None = None
    rdma: RdmaEngine | None = field(default=None, compare=False)


def resolve_transport(config: ServerConfig, local_rank: int) -> LocalTransport:
    """The settings of the rank on GPU `local_rank` of this machine, with its HCAs.

    Raises StartupError if `ib_device` names a missing device, and if there is no HCA for `rdma`.
    """
    if config.transport not in ("auto", "rdma"):
        return LocalTransport(config.transport, config.public_host)
    devices = devices_for_rank(config.ib_device, local_rank)
    if config.transport == "rdma" and not devices:
        raise StartupError(
            "transport rdma needs an InfiniBand or RoCE device with an active port; this machine has none: use "
            "--transport auto"
        )
    return LocalTransport(config.transport, config.public_host, devices, config.ib_gid_index)


def places(on_gpu: Iterable[bool]) -> str:
    """Where memory is, for the log."""
    return " and ".join(("host memory", "GPU memory")[place] for place in sorted(set(on_gpu), reverse=True))


def open_rdma(local: LocalTransport, memory: Sequence[Region], where: str = "host memory") -> LocalTransport:
    """`local` with an RDMA engine in which this memory is registered, for as long as the process lives.

    Without RDMA if the engine cannot be started or cannot register the memory: for example, GPU memory needs a kernel
    module. `where` is what places() says of the memory. Raises StartupError if the setting is `rdma`.
    """
    if not local.rdma_devices:
        return local
    try:
        engine = RdmaEngine(local.host, devices=local.rdma_devices, gid_index=local.gid_index)
        for region in memory:
            engine.hold(region)
    except StartupError as error:
        if local.setting == "rdma":
            raise
        log.warning("transport rdma is not available to send KV from %s: %s", where, error)
        return replace(local, rdma_devices=())
    log.info("KV is sent over RDMA with %s; its pools in %s are registered", engine.describe(), where)
    return replace(local, rdma=engine)


def open_receiver(
    transport: Transport, local: LocalTransport, memory: Sequence[Region], where: str
) -> ReceiveEngine | None:
    """A receive engine with this memory registered. `where` is what places() says of it.

    If that fails: raises StartupError if the setting requires this transport, else returns None. With a Mooncake wheel
    without CUDA IPC, or an HCA that cannot reach GPU memory, the other transports remain.
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
        log.warning("transport %s is not available to receive KV in %s: %s", transport, where, error)
        return None
    if transport == "rdma":
        log.info("KV is received over RDMA with %s; its pools in %s are registered", receiver.describe_hcas(), where)
    return receiver


def machine_id() -> str:
    """Identifies the machine until its next boot; the same in all its processes and containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def possible_routes(local: LocalTransport, destination: Rank, pool: Pool, *, on_gpu: bool) -> tuple[KvRoute, ...]:
    """The routes from this prefill rank to a pool of that decode rank, best first; `on_gpu`: our own pool is on a GPU.

    If a transport is set, it is the only route where it is possible, else TCP.
    """
    assert destination.session is not None, "check_pair refuses decode ranks without a session"
    routes: list[KvRoute] = []
    if local.setting in ("auto", "rdma") and local.rdma_devices and destination.rdma_session is not None:
        routes.append(KvRoute("rdma", destination.rdma_session))
    between_gpus = on_gpu and pool.memory == "device" and destination.machine == machine_id()
    if local.setting in ("auto", "nvlink") and between_gpus and destination.nvlink_session is not None:
        routes.append(KvRoute("nvlink", destination.nvlink_session))
    if local.setting in ("auto", "tcp") or not routes:
        routes.append(KvRoute("tcp", destination.session))
    return tuple(routes)


def describe_transport_mismatch(setting: TransportSetting, prefill: Rank, decode: Rank) -> str | None:
    """One sentence if the transport setting of prefill cannot reach this decode rank; else None."""
    ranks = f"prefill rank {prefill.rank} is set to transport {setting} and decode rank {decode.rank}"
    if setting == "rdma" and decode.rdma_session is None:
        return f"{ranks} has no RDMA session: its machine has no active HCA, or its own transport is another"
    if setting == "nvlink" and prefill.machine != decode.machine:
        return f"{ranks} is on another machine"
    if setting == "nvlink" and decode.nvlink_session is None:
        return f"{ranks} has no nvlink session: its pool is not on a GPU, or its own transport is another"
    return None
