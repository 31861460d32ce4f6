"""RDMA between two virtual machines, of which one can fail alone: `make test-rdma-all`.

This runs on machine 1, without torch; the receiver is on machine 2, which takes scripts from its folder in /share.
"""

import hashlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.transfer.mooncake.engine import WriteId, WriteState
from pdserve.transfer.mooncake.rdma_engine import RdmaEngine
from pdserve.transfer.mooncake.sockets import PeerUnreachableError, Region
from tests.rdma.figures import report
from tests.rdma.machine import REPOSITORY
from tests.rdma.peer import BACK_S, WRITE_BYTES, Peer, undisturbed, wait_until_used_again
from tests.rdma.receiver import HOST, Receiver

MACHINE_2 = Path("/share/2")

pytestmark = pytest.mark.skipif(
    not os.environ.get("PDSERVE_RDMA_MACHINES"), reason="needs two machines with RDMA: make test-rdma-all"
)

WRITES = 32
POOL_BYTES = WRITES * WRITE_BYTES
ENDED_S = 3.0
RECEIVER = """
import json, os, sys, time
import numpy as np
from pdserve.transfer.mooncake.engine import ReceiveEngine
with open("/dev/shm/pool", "wb") as file:
    file.truncate({size})
pool = np.memmap("/dev/shm/pool", dtype=np.uint8, mode="r+")
engine = ReceiveEngine("10.8.0.2", transport="rdma", devices=("rxe0",))
engine.register(pool.ctypes.data, pool.nbytes)
with open("/share/2/receiver.new", "w") as file:
    json.dump([engine.session, pool.ctypes.data], file)
os.rename("/share/2/receiver.new", "/share/2/receiver")
time.sleep(100000)
"""
_numbers = itertools.count(1)

source = np.random.default_rng(0).integers(1, 256, POOL_BYTES, dtype=np.uint8)
OURS = Region(source.ctypes.data, source.nbytes)


def run_here(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout


def start_there(script: str) -> Path:
    """Start a script on machine 2. Its log; beside it `.rc` appears at its end."""
    name = MACHINE_2 / f"from-1-{next(_numbers)}"
    name.with_suffix(".new").write_text(script, encoding="utf-8")
    name.with_suffix(".new").rename(name.with_suffix(".sh"))
    return name.with_suffix(".log")


def run_there(script: str) -> str:
    log = start_there(script)
    deadline = time.monotonic() + 60
    while not log.with_suffix(".rc").exists():
        assert time.monotonic() < deadline, script
        time.sleep(0.1)
    assert log.with_suffix(".rc").read_text(encoding="ascii").strip() == "0", log.read_text(encoding="utf-8")
    return log.read_text(encoding="utf-8").strip()


def digest_there() -> str:
    return run_there("sha256sum /dev/shm/pool").split()[0]


@pytest.fixture(scope="module")
def rdma() -> RdmaEngine:
    engine = RdmaEngine(HOST, devices=("rxe0",))
    engine.hold(OURS)
    return engine


@pytest.fixture(scope="module")
def receiver() -> tuple[str, Region]:
    (MACHINE_2 / "receiver.py").write_text(RECEIVER.format(size=POOL_BYTES), encoding="utf-8")
    start_there(f"cd {REPOSITORY} && PYTHONPATH=.dev:. exec .venv/bin/python /share/2/receiver.py")
    deadline = time.monotonic() + 180
    while not (MACHINE_2 / "receiver").exists():
        assert time.monotonic() < deadline, "the receiver did not start"
        time.sleep(0.2)
    session, address = json.loads((MACHINE_2 / "receiver").read_text(encoding="utf-8"))
    return session, Region(address, POOL_BYTES)


@pytest.fixture
def connect(receiver: tuple[str, Region], rdma: RdmaEngine) -> Callable[[], Peer]:
    session, region = receiver
    return lambda: Peer(session, region, rdma, OURS)


@pytest.fixture
def peer(connect: Callable[[], Peer]) -> Iterator[Peer]:
    opened = connect()
    assert opened.writes()
    yield opened
    opened.destroy()


@pytest.fixture(scope="module")
def other(rdma: RdmaEngine) -> Iterator[Peer]:
    """A second peer, on this machine, which nothing happens to."""
    with Receiver(POOL_BYTES) as process:
        yield Peer(process.session, process.region, rdma, OURS)


def write_all_that_is_new(peer: Peer, seed: int) -> list[WriteId | None]:
    source[:] = np.random.default_rng(seed).integers(1, 256, POOL_BYTES, dtype=np.uint8)
    return [peer.submit(index) for index in range(WRITES)]


def test_bytes_arrive_on_the_other_machine(peer: Peer) -> None:
    assert set(peer.ends(write_all_that_is_new(peer, 1), 60.0)) == {WriteState.DONE}
    assert digest_there() == hashlib.sha256(source.tobytes()).hexdigest()


def test_bytes_arrive_over_a_link_that_loses_packets(peer: Peer) -> None:
    run_here("tc qdisc add dev eth0 root netem loss 1%")
    try:
        assert set(peer.ends(write_all_that_is_new(peer, 2), 120.0)) == {WriteState.DONE}
    finally:
        shown = run_here("tc -s qdisc show dev eth0")
        run_here("tc qdisc del dev eth0 root")
    assert "dropped 0" not in shown, "no packet was lost"
    assert digest_there() == hashlib.sha256(source.tobytes()).hexdigest()


def test_writes_end_when_the_other_machine_is_cut_off_and_rdma_comes_back(
    peer: Peer, connect: Callable[[], Peer]
) -> None:
    """Its whole network goes down in the middle of a transfer."""
    both = "for name in eth0 eth1; do ip link set $name {state}; done"
    start_there(f"{both.format(state='down')}; sleep 20; {both.format(state='up')}")
    states = [WriteState.DONE]
    seed = 10
    while WriteState.PENDING not in states:  # until the fault has come
        seed += 1
        states = peer.ends(write_all_that_is_new(peer, seed), 3.0)
    ended_s = peer.destroy()
    report("other machine cut off: writes to it have ended", ended_s, ENDED_S)
    back = time.monotonic() + 20 + BACK_S
    works = False
    while not works and time.monotonic() < back:
        time.sleep(1)
        try:
            again = connect()
        except PeerUnreachableError:
            continue
        works = again.writes(timeout_s=2.0)
        again.destroy()
    assert ended_s < ENDED_S
    assert works, "RDMA did not come back"


@pytest.mark.parametrize("down_s", [2, 60])
def test_the_port_of_the_other_machine_fails_while_its_tcp_works(
    peer: Peer, connect: Callable[[], Peer], other: Peer, down_s: int
) -> None:
    """Our port stays active, so nothing but the writes shows it."""
    idle = connect()
    assert idle.writes()
    run_there("ip link set eth0 down")
    down = time.monotonic()
    fault = f"port of the other machine down for {down_s} s"
    with undisturbed(other, fault):
        states = peer.ends(write_all_that_is_new(peer, 30 + down_s), 1.0)
        ended_s = peer.destroy()
    report(f"{fault}: writes have ended", ended_s, ENDED_S)
    time.sleep(max(0.0, down + down_s - time.monotonic()))
    run_there("ip link set eth0 up")
    assert WriteState.DONE not in states
    assert ended_s < ENDED_S
    wait_until_used_again(idle, connect, fault)
    idle.destroy()
