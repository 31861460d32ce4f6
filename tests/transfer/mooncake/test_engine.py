"""Mooncake engines of real processes over TCP loopback; peers are healthy, stopped, dead, or other services."""

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pdserve.common.errors import StartupError
from pdserve.transfer.mooncake import rdma_engine
from pdserve.transfer.mooncake.engine import (
    PREFLIGHT_TIMEOUT_S,
    ReceiveEngine,
    SendEngine,
    WriteId,
    WriteState,
    _cut_late_handshake,
)
from pdserve.transfer.mooncake.library import TCP_LANES, create_engine
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import (
    PeerUnreachableError,
    Region,
    cut_connections,
    describe_engine,
    drop_unsent,
    wake_listener,
)
from tests.cluster.servers import REPOSITORY
from tests.transfer.data.kv_receiver import Receiver

POOL_BYTES = 32 << 20


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(POOL_BYTES) as process:
        yield process


def wait_for(engine: SendEngine, write: WriteId | None, timeout_s: float = 10.0) -> WriteState:
    assert write is not None
    deadline = time.monotonic() + timeout_s
    while (state := engine.poll(write)) is WriteState.PENDING:
        assert time.monotonic() < deadline, "the write did not end"
        time.sleep(0.0005)
    return state


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / ".dev"), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_write_changes_only_its_bytes_and_its_id_ends_once(receiver: Receiver) -> None:
    source = np.random.default_rng(0).integers(1, 256, 1 << 20, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    write = engine.submit(source.ctypes.data + 5, receiver.base_address + 1001, 700_001)
    assert wait_for(engine, write) is WriteState.DONE
    assert (receiver.pool[1001 : 1001 + 700_001] == source[5 : 5 + 700_001]).all()
    assert not receiver.pool[:1001].any()
    assert not receiver.pool[1001 + 700_001 :].any()
    assert write is not None
    with pytest.raises(AssertionError, match="already ended"):
        engine.poll(write)
    engine.destroy()
    engine.destroy()
    assert receiver.leave() == 0
    assert receiver.stderr() == ""


def test_a_write_outside_the_registered_region_fails(receiver: Receiver) -> None:
    source = np.ones(4096, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    outside = engine.submit(source.ctypes.data, receiver.base_address + receiver.size_bytes - 100, 4096)
    assert wait_for(engine, outside) is WriteState.FAILED
    engine.destroy()
    assert not receiver.pool.any()


def test_listeners_of_a_loopback_host_are_bound_to_the_loopback_device() -> None:
    engine = ReceiveEngine("127.0.0.1")
    try:
        ports = {int(engine.session.rpartition(":")[2]), describe_engine(engine.session, 1).tcp_data_port or 0}
        assert listening_devices(ports) == dict.fromkeys(ports, "lo")
    finally:
        engine.close()
    assert listening_devices(ports) == {}


def test_the_listener_of_an_rdma_engine_for_this_machine_is_bound_to_the_loopback_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an engine of TCP in its place: this machine need not have an HCA."""
    monkeypatch.setattr(rdma_engine, "create_engine", lambda host, *_, **__: create_engine(host))
    engines = {host: RdmaEngine(host) for host in ("127.0.0.1", "127.0.1.1", "0.0.0.0")}
    ports = {host: engine.mooncake.get_rpc_port() for host, engine in engines.items()}
    devices = listening_devices(set(ports.values()))
    for port in ports.values():
        wake_listener(port)
    assert [devices[port] for port in ports.values()] == ["lo", "lo", ""]


def test_registering_twice_is_refused() -> None:
    engine = ReceiveEngine("127.0.0.1")
    memory = np.zeros(4096, dtype=np.uint8)
    try:
        engine.register(memory.ctypes.data, memory.nbytes)
        with pytest.raises(StartupError, match=r"4096 bytes .* overlaps"):
            engine.register(memory.ctypes.data, memory.nbytes)
    finally:
        engine.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::1", ""])
def test_hosts_that_peers_cannot_reach_are_refused(host: str) -> None:
    with pytest.raises(StartupError, match="advertise_host"):
        ReceiveEngine(host)


def test_opening_detects_a_closed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(PeerUnreachableError, match=f"decode 127.0.0.1:{port} refuses connections"):
        SendEngine(f"127.0.0.1:{port}", [Region(0, 1)])


def test_opening_detects_a_stopped_process_within_its_timeout(receiver: Receiver) -> None:
    receiver.stop()
    started = time.monotonic()
    with pytest.raises(PeerUnreachableError, match=f"decode {receiver.session} does not answer"):
        SendEngine(receiver.session, [receiver.region])
    assert PREFLIGHT_TIMEOUT_S <= time.monotonic() - started < PREFLIGHT_TIMEOUT_S + 0.5


def test_idle_connections_do_not_delay_handshakes(receiver: Receiver) -> None:
    """Mooncake answers one connection at a time, and waits 5 s for each."""
    host, _, port = receiver.session.rpartition(":")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, int(port))))
        time.sleep(0.2)  # these are accepted first
        started = time.monotonic()
        engine = SendEngine(receiver.session, [receiver.region])
        source = np.ones(1000, dtype=np.uint8)
        write = engine.submit(source.ctypes.data, receiver.base_address, source.nbytes)
        assert wait_for(engine, write) is WriteState.DONE
        assert time.monotonic() - started < PREFLIGHT_TIMEOUT_S
        engine.destroy()


def test_opening_detects_another_service_and_memory_that_is_not_registered(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerUnreachableError, match="does not speak Mooncake's handshake"):
            SendEngine(f"127.0.0.1:{port}", [Region(0, 1)])
        thread.join()
    with pytest.raises(PeerUnreachableError, match="has not registered the memory it announced"):
        SendEngine(receiver.session, [receiver.region, Region(receiver.base_address, receiver.size_bytes + 1)])


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_invalid_host_name_is_unreachable(host: str) -> None:
    with pytest.raises(PeerUnreachableError, match=f"decode {host}:80 cannot be reached"):
        describe_engine(f"{host}:80", PREFLIGHT_TIMEOUT_S)


def test_answer_that_came_while_this_process_was_stopped_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops after the deadline was set, and runs again after the deadline, when the answer is there."""
    answered = threading.Event()
    calls = itertools.count()

    def monotonic() -> float:
        if next(calls) == 0:
            return time.monotonic()
        assert answered.wait(30)
        return time.monotonic() + 10 * PREFLIGHT_TIMEOUT_S

    monkeypatch.setattr("pdserve.transfer.mooncake.sockets.time", SimpleNamespace(monotonic=monotonic))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                body = b'{"name": "receiver"}'
                connection.sendall(struct.pack("<QB", 1 + len(body), 1) + body)
                answered.set()

        thread = threading.Thread(target=answer)
        thread.start()
        description = describe_engine(f"127.0.0.1:{server.getsockname()[1]}", PREFLIGHT_TIMEOUT_S)
        thread.join()
    assert description.name == "receiver"


def test_handshake_is_not_cut_because_this_process_was_stopped() -> None:
    """The stop is longer than the timeout. The handshake ends 0.2 s of running time later."""

    class Submitted(threading.Event):
        stopped = True
        runs_s = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            if not self.stopped:
                self.runs_s += timeout
            self.stopped = False
            return self.runs_s >= 0.2

    _cut_late_handshake(Submitted(), lambda: pytest.fail("it was cut"))


def test_first_write_ends_if_the_peer_hangs_after_the_preflight(receiver: Receiver) -> None:
    source = np.ones(4096, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    receiver.stop()
    started = time.monotonic()
    assert engine.submit(source.ctypes.data, receiver.base_address, 4096) is None
    assert time.monotonic() - started < 15  # 60 s without the guard
    engine.destroy()


def test_first_write_ends_if_it_connects_after_its_timeout(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was stopped before it connected: at the timeout there is no connection to cut yet."""
    found: list[int] = []

    def cut(session: str) -> int:
        found.append(cut_connections(session) if found else 0)
        return found[-1]

    monkeypatch.setattr("pdserve.transfer.mooncake.engine.cut_connections", cut)
    source = np.ones(4096, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    receiver.stop()
    started = time.monotonic()
    assert engine.submit(source.ctypes.data, receiver.base_address, 4096) is None
    assert time.monotonic() - started < 15  # 60 s with a single attempt
    while not any(found) and time.monotonic() - started < 20:
        time.sleep(0.01)  # the guard thread may not have returned from its cut yet
    assert found[0] == 0
    assert any(found)
    engine.destroy()


def test_destroy_with_a_hung_peer_is_quick() -> None:
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=1) >= 0.5:  # a busy machine may make the first one slow
        with Receiver(POOL_BYTES) as receiver:
            took_s.append(_seconds_to_destroy(receiver))
    assert min(took_s) < 0.5, took_s  # up to 1 s without waking the listener


def _seconds_to_destroy(receiver: Receiver) -> float:
    """Of an engine whose peer hangs."""
    source = np.ones(16 << 20, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    assert wait_for(engine, engine.submit(source.ctypes.data, receiver.base_address, 4096)) is WriteState.DONE
    receiver.stop()
    writes = [engine.submit(source.ctypes.data, receiver.base_address, 4 << 20) for _ in range(8)]
    time.sleep(0.2)
    assert all(write is not None and engine.poll(write) is WriteState.PENDING for write in writes)
    started = time.monotonic()
    engine.destroy()
    return time.monotonic() - started


def test_destroy_waits_for_connections_after_a_stop_of_this_process(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of Mooncake were stopped too, so they open their connections only afterwards."""
    source = np.ones(4096, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    assert wait_for(engine, engine.submit(source.ctypes.data, receiver.base_address, 4096)) is WriteState.DONE
    receiver.stop()
    writes = [engine.submit(source.ctypes.data, receiver.base_address, 4096) for _ in range(2)]
    assert all(writes)
    found = iter((0, 0, 1, 2))
    stopped_s = 0.0

    def drop(_data_port: int) -> int:
        nonlocal stopped_s
        stopped_s = 60.0
        return next(found)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s, sleep=time.sleep)
    for module in ("transfer.mooncake.engine", "common.stuck"):
        monkeypatch.setattr(f"pdserve.{module}.time", clock)
    monkeypatch.setattr("pdserve.transfer.mooncake.engine.drop_unsent", drop)
    engine.destroy()
    assert next(found, None) is None, "it did not wait for both connections"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections may take long on a busy machine."""
    monkeypatch.setattr("pdserve.transfer.mooncake.engine.CONNECTING_S", 20.0)


@pytest.mark.usefixtures("patient")
def test_destroy_drops_bytes_that_the_kernel_has_not_sent(receiver: Receiver) -> None:
    """Bytes that wait in the kernel for a hung peer would arrive when their pages belong to another request."""
    source = np.ones(16 << 20, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    data_port = describe_engine(receiver.session, 1).tcp_data_port
    assert data_port
    assert wait_for(engine, engine.submit(source.ctypes.data, receiver.base_address, 4096)) is WriteState.DONE
    receiver.stop()
    for _ in range(4):
        assert engine.submit(source.ctypes.data, receiver.base_address, 16 << 20) is not None
    deadline = time.monotonic() + 5
    while not any(unsent_bytes(data_port)):
        assert time.monotonic() < deadline, "the receiver has read everything: nothing is left to drop"
        time.sleep(0.01)
    engine.destroy()
    deadline = time.monotonic() + 2
    while unsent_bytes(data_port):  # the kernel would keep them for minutes
        assert time.monotonic() < deadline, "the kernel still has bytes for the receiver"
        time.sleep(0.01)


@pytest.mark.usefixtures("patient")
def test_destroy_covers_connections_that_are_being_opened(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def drop(data_port: int) -> int:
        found.append(drop_unsent(data_port))
        return found[-1]

    monkeypatch.setattr("pdserve.transfer.mooncake.engine.drop_unsent", drop)
    source = np.ones(16 << 20, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    assert wait_for(engine, engine.submit(source.ctypes.data, receiver.base_address, 4096)) is WriteState.DONE
    receiver.stop()
    for _ in range(TCP_LANES + 1):  # the first has a connection, the others are about to get one
        assert engine.submit(source.ctypes.data, receiver.base_address, 16 << 20) is not None
    engine.destroy()
    assert found[-1] == TCP_LANES


@pytest.mark.usefixtures("patient")
def test_destroy_does_not_wait_for_connections_to_a_dead_peer(receiver: Receiver) -> None:
    """Chunks on the other ranks of the peer are stopped only after destroy() has returned."""
    source = np.ones(16 << 20, dtype=np.uint8)
    engine = SendEngine(receiver.session, [receiver.region])
    writes = [engine.submit(source.ctypes.data, receiver.base_address, 16 << 20) for _ in range(16)]
    receiver.kill()
    assert any(write is not None and wait_for(engine, write) is WriteState.FAILED for write in writes)
    started = time.monotonic()
    engine.destroy()
    assert time.monotonic() - started < 5


def test_mooncake_logs_nothing_about_failed_writes_and_missing_peers() -> None:
    session = """
import sys, time, ctypes
from pdserve.transfer.mooncake.engine import ReceiveEngine, SendEngine, WriteState
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
memory = ctypes.create_string_buffer(4096)
address = ctypes.addressof(memory)
receive = ReceiveEngine("127.0.0.1")
receive.register(address, 4096)
for offset, expected in ((0, WriteState.DONE), (100, WriteState.FAILED)):
    send = SendEngine(receive.session, [Region(address, 4096)])
    write = send.submit(address, address + offset, 4096)
    while (state := send.poll(write)) is WriteState.PENDING:
        time.sleep(0.001)
    assert state is expected, state
    send.destroy()
receive.close()
try:
    SendEngine(receive.session, [Region(address, 4096)])
except PeerUnreachableError:
    print("done")
"""
    quiet = run_python(session)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "done\n", "")
    loud = run_python(session, MC_LOG_LEVEL="INFO")
    assert loud.returncode == 0
    assert "mooncake" in loud.stderr.lower() or "transfer_metadata" in loud.stderr


def test_dangerous_environment_variables_are_removed() -> None:
    # With MC_LOG_DIR, Mooncake aborts the process at import.
    result = run_python(
        "import os; from pdserve.transfer.mooncake.engine import ReceiveEngine; ReceiveEngine('127.0.0.1').close();"
        "print('MC_LOG_DIR' in os.environ, os.environ['MC_FORCE_TCP'])",
        MC_LOG_DIR="/tmp",
        MC_FORCE_TCP="0",
    )
    assert (result.returncode, result.stdout) == (0, "False 1\n")
    assert "MC_LOG_DIR is set in the environment" in result.stderr


def test_creating_engines_does_not_reallocate_the_environment() -> None:
    """Native threads call getenv() at any time. If an engine added a variable, glibc would free the table they read."""
    result = run_python(
        "import ctypes\n"
        "from pdserve.transfer.mooncake import library\n"
        "table = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ')\n"
        "library.prepare_environment(3)\n"
        "prepared = table.value\n"
        "for transport in ('tcp', 'rdma', 'nvlink', 'tcp'): library._choose_transport(transport)\n"
        "engines = [library.create_engine('127.0.0.1', 'tcp', sends=sends) for sends in (False, True)]\n"
        "assert table.value == prepared\n"
        "print('in place')"
    )
    assert result.stdout == "in place\n", result.stderr


def test_error_for_a_missing_wheel_names_the_extras() -> None:
    result = run_python(
        "import sys; sys.modules['mooncake'] = None\n"
        "from pdserve.common.errors import StartupError\n"
        "from pdserve.transfer.mooncake.engine import ReceiveEngine\n"
        "try: ReceiveEngine('127.0.0.1')\n"
        "except StartupError as error: print(error)"
    )
    assert "not installed: pip install 'pdserve[cpu]'" in result.stdout, result.stderr


def listening_devices(ports: set[int]) -> dict[int, str]:
    """The device each of this process's listeners on `ports` is bound to."""
    devices = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (plain integers wanted)
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # not a socket, or the directory itself
        with sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] in ports:
                device = sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                devices[sock.getsockname()[1]] = device.rstrip(b"\0").decode()
    return devices


def unsent_bytes(port: int) -> list[int]:
    """Undelivered bytes of each connection of this machine to `port`, also of a process that has ended."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, _, remote, _, queues, *_ = line.split()
            if int(remote.rpartition(":")[2], 16) == port:
                found.append(int(queues.partition(":")[0], 16))
    return found
