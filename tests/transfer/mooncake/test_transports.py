"""The choice of a transport, from the announcements of both sides and the devices of the machine.

The test machine has no HCA: a recording engine replaces Mooncake's to check the RDMA settings. The real Mooncake is
used to test that an RDMA engine is refused without an HCA, and that `auto` continues without it.
"""

import logging
import os
import queue
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.configs.setting_types import TransportSetting
from pdserve.memory.kv_pool import PROBE_BYTES
from pdserve.transfer.data import routed_engine
from pdserve.transfer.data.chunk_writer import ChunkWriter
from pdserve.transfer.data.local_pool import LocalPool
from pdserve.transfer.data.receivers import Receivers
from pdserve.transfer.data.routed_engine import PoolPair
from pdserve.transfer.data.sender import PeerSender, SendJob, SendResult
from pdserve.transfer.mooncake import confinement
from pdserve.transfer.mooncake import engine as engine_module
from pdserve.transfer.mooncake import library as mooncake_library
from pdserve.transfer.mooncake import rdma_engine as rdma_engine_module
from pdserve.transfer.mooncake import transports as transports_module
from pdserve.transfer.mooncake.engine import SendEngine
from pdserve.transfer.mooncake.infiniband import devices_for_rank
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import EngineDescription, Hca, Region
from pdserve.transfer.mooncake.transports import (
    KvRoute,
    LocalTransport,
    describe_transport_mismatch,
    machine_id,
    open_rdma,
    possible_routes,
    resolve_transport,
)
from pdserve.transfer.plan.copy_runs import CopyRuns
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.protocol.messages import Pool, Rank, TransferKey

HERE = Rank(0, "127.0.0.1:1", (), machine_id(), "127.0.0.1:2")
ELSEWHERE = Rank(0, "10.0.0.9:1", (), "another machine", "10.0.0.9:2")
TCP_ONLY = Rank(0, "127.0.0.1:1", (), machine_id(), None)
WITH_HCA = msgspec.structs.replace(ELSEWHERE, rdma_session="10.0.0.9:3")
LAYOUT = KvLayout((Plane("k", 4),), 0, 1, 0, 1, 16, 4, "uint8")
DEVICE = Pool(LAYOUT, 0, LAYOUT.size_bytes)
HOST = Pool(LAYOUT, 0, LAYOUT.size_bytes, memory="host")


SHOWN = "mlx5_0 port 1, GID fe80::1"


class Memory:
    """A pool of bytes, declared to be on a GPU or not."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.data = torch.zeros(LAYOUT.size_bytes + PROBE_BYTES, dtype=torch.uint8)
        self.probe = self.data[LAYOUT.size_bytes :]
        self.on_gpu = on_gpu

    @property
    def base_address(self) -> int:
        return self.data.data_ptr()

    @property
    def size_bytes(self) -> int:
        return LAYOUT.size_bytes

    @property
    def registered_bytes(self) -> int:
        return len(self.data)

    def read_tokens(self, pages: object, start: int, end: int) -> list[torch.Tensor]:
        raise NotImplementedError

    def write_tokens(self, pages: object, start: int, planes: object) -> None:
        raise NotImplementedError


class RecordingEngine:
    """Replaces `mooncake.engine.TransferEngine` and records its calls."""

    made: list["RecordingEngine"]
    registers = 0
    """Status that register_memory returns."""

    def __init__(self) -> None:
        self.arguments: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self.registered: list[tuple[int, int]] = []
        self.written: list[tuple[int, int, int]] = []
        self.made.append(self)

    def initialize(self, *arguments: str) -> int:
        self.arguments = arguments
        self.environment = {name: value for name, value in os.environ.items() if name.startswith("MC_")}
        return 0

    def get_rpc_port(self) -> int:
        return 1000 + len(self.made)

    def register_memory(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return self.registers

    def unregister_memory(self, address: int) -> int:
        self.registered = [region for region in self.registered if region[0] != address]
        return 0

    def transfer_submit_write(self, session: str, source: int, destination: int, size: int) -> int:
        assert session == "10.0.0.9:3"
        self.written.append((source, destination, size))
        return len(self.written)

    def transfer_check_status(self, _write: int) -> int:
        return 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordingEngine]]:
    """Recording engines instead of Mooncake's, and peers with all memory registered."""

    class Module:
        TransferEngine = RecordingEngine

    RecordingEngine.made = []
    monkeypatch.setattr(mooncake_library, "_module", Module())
    for name in (*mooncake_library.SETTINGS, "MC_GID_INDEX", "MC_FORCE_TCP", "MC_FORCE_HCA"):
        monkeypatch.setenv(name, "before")
    description = EngineDescription("", buffers=(Region(0, 1 << 62),), devices=(Hca("mlx5_0", "fe80::1"),))
    for module in (engine_module, rdma_engine_module, confinement):
        monkeypatch.setattr(module, "describe_engine", lambda *_: description)
    monkeypatch.setattr(confinement, "confine_to_loopback", lambda _: None)
    monkeypatch.setattr(routed_engine, "port_problem", lambda _: None)
    yield RecordingEngine.made
    RecordingEngine.registers = 0


@pytest.fixture
def hca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake sysfs tree with two HCAs, which replaces that of the machine."""
    monkeypatch.setattr(transports_module, "devices_for_rank", partial(devices_for_rank, sysfs=tmp_path))
    for device in ("mlx5_0", "mlx5_1"):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
    return tmp_path


def local(setting: TransportSetting, *devices: str) -> LocalTransport:
    return LocalTransport(setting, "10.0.0.1", devices)


@pytest.mark.parametrize("setting", ["auto", "nvlink"])
def test_gpus_of_one_machine_write_to_each_other(setting: TransportSetting) -> None:
    assert possible_routes(local(setting), HERE, DEVICE, on_gpu=True)[0] == ("nvlink", "127.0.0.1:2")


@pytest.mark.parametrize("setting", ["auto", "rdma"])
def test_rdma_goes_first_where_both_sides_have_an_hca(setting: TransportSetting) -> None:
    near = msgspec.structs.replace(HERE, rdma_session="127.0.0.1:3")
    for pool, on_gpu in ((DEVICE, True), (HOST, True), (DEVICE, False)):
        assert possible_routes(local(setting, "mlx5_0"), WITH_HCA, pool, on_gpu=on_gpu)[0] == ("rdma", "10.0.0.9:3")
        assert possible_routes(local(setting, "mlx5_0"), near, pool, on_gpu=on_gpu)[0] == ("rdma", "127.0.0.1:3")


def test_auto_has_fallback_routes_and_a_set_transport_has_none() -> None:
    near = msgspec.structs.replace(HERE, rdma_session="127.0.0.1:3")
    assert [
        [route.transport for route in possible_routes(local(setting, "mlx5_0"), near, DEVICE, on_gpu=True)]
        for setting in ("auto", "rdma", "nvlink", "tcp")
    ] == [["rdma", "nvlink", "tcp"], ["rdma"], ["nvlink"], ["tcp"]]


@pytest.mark.parametrize(
    ("transport", "rank", "pool", "on_gpu"),
    [
        (local("tcp", "mlx5_0"), HERE, DEVICE, True),
        (local("tcp", "mlx5_0"), WITH_HCA, DEVICE, True),
        (local("nvlink", "mlx5_0"), WITH_HCA, HOST, True),
        (local("auto"), WITH_HCA, DEVICE, True),
        (local("auto", "mlx5_0"), ELSEWHERE, DEVICE, True),
        (local("auto"), HERE, DEVICE, False),
        (local("auto"), HERE, HOST, True),
        (local("nvlink"), HERE, HOST, True),
        (local("auto"), TCP_ONLY, DEVICE, True),
    ],
)
def test_other_pairs_use_tcp(transport: LocalTransport, rank: Rank, pool: Pool, on_gpu: bool) -> None:
    assert possible_routes(transport, rank, pool, on_gpu=on_gpu) == (KvRoute("tcp", str(rank.session)),)


def test_impossible_transport_is_refused_at_pairing() -> None:
    assert describe_transport_mismatch("nvlink", HERE, HERE) is None
    assert describe_transport_mismatch("auto", HERE, ELSEWHERE) is None
    assert describe_transport_mismatch("rdma", HERE, WITH_HCA) is None
    third = msgspec.structs.replace(ELSEWHERE, rank=3)
    assert describe_transport_mismatch("nvlink", HERE, third) == (
        "prefill rank 0 is set to transport nvlink and decode rank 3 is on another machine"
    )
    assert "decode rank 0 has no nvlink session" in str(describe_transport_mismatch("nvlink", HERE, TCP_ONLY))
    assert "decode rank 3 has no RDMA session" in str(describe_transport_mismatch("rdma", HERE, third))


def test_settings_are_resolved_against_the_machine(hca: Path) -> None:
    def resolve(*, rank: int = 0, **settings: object) -> LocalTransport:
        return resolve_transport(PrefillConfig.model_validate(settings), rank)

    assert resolve() == LocalTransport("auto", "127.0.0.1", ("mlx5_0", "mlx5_1"))
    assert resolve(advertise_host="10.0.0.1", transport="rdma", ib_device="mlx5_1,mlx5_0", ib_gid_index=3, rank=1) == (
        LocalTransport("rdma", "10.0.0.1", ("mlx5_0",), 3)
    )
    assert resolve(transport="tcp", ib_device="mlx5_9") == LocalTransport("tcp", "127.0.0.1")
    with pytest.raises(StartupError, match=r"mlx5_9 does not exist; devices of this machine: mlx5_0 \(ACTIVE\)"):
        resolve(ib_device="mlx5_9")
    shutil.rmtree(hca)
    assert resolve() == LocalTransport("auto", "127.0.0.1")
    with pytest.raises(StartupError, match=r"transport rdma needs .* this machine has none"):
        resolve(transport="rdma")


@pytest.mark.usefixtures("hca")
def test_auto_ignores_a_broken_hca_and_rdma_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The real Mooncake: the machine lists an HCA, but it cannot be opened."""
    pools = [LocalPool(Memory(), LAYOUT)]
    with caplog.at_level(logging.WARNING):
        receivers = Receivers(DecodeConfig(), pools, local_rank=0)
    try:
        assert list(receivers.sessions) == ["tcp"]
        told = (
            "transport rdma is not available to receive KV in host memory: Mooncake could not start an engine for rdma"
        )
        assert told in caplog.text
    finally:
        receivers.close()
    with pytest.raises(StartupError, match=r"could not start an engine for rdma with mlx5_0, mlx5_1"):
        Receivers(DecodeConfig(transport="rdma"), pools, local_rank=0)
    with pytest.raises(StartupError, match="could not start an engine for rdma with mlx5_1"):
        ChunkWriter(
            0,
            pools,
            PrefillConfig(transport="rdma", ib_device="mlx5_1"),
            local_rank=0,
            on_written=print,
        )


@pytest.mark.usefixtures("hca")
def test_receivers_open_the_transports_that_their_pools_support(
    engines: list[RecordingEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device, host = Memory(on_gpu=True), Memory()
    pools = [LocalPool(device, LAYOUT), LocalPool(host, LAYOUT)]
    receivers = Receivers(DecodeConfig(advertise_host="10.0.0.9", ib_gid_index=5), pools, local_rank=0)
    assert receivers.sessions == {"tcp": "10.0.0.9:1001", "nvlink": "10.0.0.9:1002", "rdma": "10.0.0.9:1003"}
    tcp, nvlink, rdma = engines
    both = [(memory.base_address, memory.registered_bytes) for memory in (device, host)]
    assert [engine.registered for engine in (tcp, nvlink, rdma)] == [both, both[:1], both]
    assert [engine.arguments[3] for engine in engines] == ["", "", "mlx5_0,mlx5_1"]
    assert [
        set(engine.environment) & {"MC_FORCE_TCP", "MC_INTRANODE_NVLINK", "MC_FORCE_HCA"} for engine in engines
    ] == [
        {"MC_FORCE_TCP"},
        {"MC_INTRANODE_NVLINK"},
        {"MC_FORCE_HCA"},
    ]
    assert rdma.environment["MC_GID_INDEX"] == "5"
    told = f"KV is received over RDMA with {SHOWN}; its pools in GPU memory and host memory are registered"
    assert told in caplog.messages


@pytest.mark.usefixtures("hca")
@pytest.mark.parametrize(
    ("transport", "opened"), [("tcp", ["tcp"]), ("nvlink", ["tcp", "nvlink"]), ("rdma", ["tcp", "rdma"])]
)
def test_set_transport_disables_the_others(
    transport: TransportSetting, opened: list[str], engines: list[RecordingEngine]
) -> None:
    config = DecodeConfig(transport=transport)
    receivers = Receivers(config, [LocalPool(Memory(on_gpu=True), LAYOUT)], local_rank=0)
    assert list(receivers.sessions) == opened
    assert len(engines) == len(opened)


def test_nvlink_needs_a_pool_on_a_gpu() -> None:
    with pytest.raises(StartupError, match="host memory"):
        Receivers(DecodeConfig(transport="nvlink"), [LocalPool(Memory(), LAYOUT)], local_rank=0)


def test_rdma_is_disabled_if_memory_cannot_be_registered(
    engines: list[RecordingEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    regions = [Region(4096, 100)]
    usable = local("auto", "mlx5_0")
    opened = open_rdma(usable, regions)
    assert (opened, opened.rdma is not None) == (usable, True)
    assert engines[0].registered == [(4096, 100)]
    RecordingEngine.registers = -1
    assert open_rdma(usable, regions, "GPU memory") == local("auto")
    assert caplog.messages == [
        f"KV is sent over RDMA with {SHOWN}; its pools in host memory are registered",
        "transport rdma is not available to send KV from GPU memory: Mooncake cannot register 100 bytes at 0x1000: "
        "status -1",
    ]
    with pytest.raises(StartupError, match="cannot register 100 bytes"):
        open_rdma(local("rdma", "mlx5_0"), regions)
    assert open_rdma(local("rdma"), regions) == local("rdma")
    assert len(engines) == 3, "an engine was opened without an HCA"


def test_all_peers_share_an_rdma_engine_and_a_registration(engines: list[RecordingEngine]) -> None:
    pool, buffer = Region(4096, 100), Region(8192, 50)
    rdma = RdmaEngine("10.0.0.1", devices=("mlx5_1",), gid_index=2)
    rdma.hold(pool)
    assert engines[0].arguments == ("10.0.0.1:0", "P2PHANDSHAKE", "rdma", "mlx5_1")
    assert engines[0].environment["MC_GID_INDEX"] == "2"
    senders = [SendEngine("10.0.0.9:3", [], transport="rdma", rdma=rdma, sources=[pool, buffer]) for _ in range(2)]
    for sender in senders:
        assert engines[0].registered == [(4096, 100), (8192, 50)]
        sender.destroy()
        sender.destroy()
    assert engines[0].registered == [(4096, 100)], "the buffer was of these senders only"
    SendEngine("10.0.0.9:1", [], sources=[pool]).destroy()
    assert engines[1].arguments == ("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "")
    assert engines[1].registered == []


def test_a_sender_over_rdma_writes_from_all_its_pools(engines: list[RecordingEngine]) -> None:
    results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
    first = PoolPair(Region(4096, 100), Pool(LAYOUT, 1_000_000, 100))
    second = PoolPair(Region(8192, 50), Pool(LAYOUT, 2_000_000, 50))
    sender = PeerSender(
        [KvRoute("rdma", "10.0.0.9:3")],
        [first, second],
        window=4,
        local=open_rdma(local("auto", "mlx5_0"), []),
    )
    runs = CopyRuns(np.array([10]), np.array([20]), np.array([30]))
    sender.submit(SendJob(TransferKey(1, 0), runs, first, results.put))
    sender.submit(SendJob(TransferKey(1, 0), runs, second, results.put))
    assert results.get(timeout=5).ok
    assert results.get(timeout=5).ok
    assert engines[0].registered == [(4096, 100), (8192, 50)]
    sender.close()
    assert engines[0].written == [(4106, 1_000_020, 30), (8202, 2_000_020, 30)]


def test_source_memory_that_cannot_be_registered_fails_the_job(engines: list[RecordingEngine]) -> None:
    results: queue.SimpleQueue[SendResult] = queue.SimpleQueue()
    pools = PoolPair(Region(4096, 100), DEVICE)
    rdma = open_rdma(local("auto", "mlx5_0"), [])
    RecordingEngine.registers = -1
    sender = PeerSender([KvRoute("rdma", "10.0.0.9:3")], [pools], window=4, local=rdma)
    sender.submit(
        SendJob(TransferKey(1, 0), CopyRuns(np.array([0]), np.array([0]), np.array([30])), pools, results.put)
    )
    result = results.get(timeout=5)
    sender.close()
    assert engines[0].written == []
    assert result.reason == "Mooncake cannot register 100 bytes at 0x1000: status -1"
    assert not result.late_writes
