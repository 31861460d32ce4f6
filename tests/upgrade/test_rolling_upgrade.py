"""A rolling upgrade under load: servers are replaced one by one by the other version, and back. No request fails.

`make test-upgrade BASE=v0.1.0`. BASE is a tag or a commit; `auto` is the last tag before this commit or, if there is
none, the commit before the last change of the control messages. Its wheel is built from git.
"""

import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import tests.cluster.servers as servers_module
from tests.checkpoints import load_reference, make_checkpoint, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import HTTP, REPOSITORY, Cluster, Server, body, cluster, wait_until

BASE = os.environ.get("PDSERVE_UPGRADE", "")
MESSAGES = "transfer/protocol/messages.py"
COMMON = ("--page-size", "8", "--kv-tokens", "2048", "--shutdown-timeout-s", "30", "--cpu-kernels", "torch")
PROMPTS = [[(first + 7 * index) % 251 for index in range(40 + 30 * first)] for first in range(4)]
NEW_TOKENS = 16
START_TIMEOUT_S = 300.0
"""Four servers that are not forked start at the same time."""
SERVED = 8
"""At least this many requests are answered between two replacements."""

pytestmark = pytest.mark.skipif(not BASE, reason="set PDSERVE_UPGRADE: make test-upgrade")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()


def find_base() -> str:
    if BASE != "auto":
        return git("rev-parse", f"{BASE}^{{commit}}")
    tags = git("tag", "--merged", "HEAD^", "--sort=-creatordate").split()
    return git("rev-parse", f"{tags[0]}^{{commit}}" if tags else git("log", "-1", "--format=%H", "--", MESSAGES) + "^")


def build_wheel(commit: str, directory: Path) -> Path:
    """The unpacked wheel of a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, capture_output=True).stdout
    source, unpacked = directory / "source", directory / "wheel"
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="tar")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(unpacked)
    return unpacked


class Load:
    """Clients that send to the decode servers in service, as a router does. Every request must be answered."""

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected = expected
        self.in_service: list[Server] = []
        self.served = 0
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(3)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)

    def wait_served(self) -> None:
        goal = self.served + SERVED
        wait_until(lambda: self.served >= goal or bool(self.failures), 120, "requests are answered")

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            with self._lock:
                server = self.in_service[number % len(self.in_service)]
            number += 1
            which = number % len(PROMPTS)
            try:
                answer = HTTP.post(f"{server.url}/generate", json=body(PROMPTS[which], NEW_TOKENS), timeout=120)
            except httpx.TransportError as error:
                self.failures.append(repr(error))
                continue
            if answer.status_code == 503 and answer.json()["error"]["message"].startswith("stopping"):
                continue  # sent just before the server was taken out of service: a router sends it to another one
            if answer.status_code != 200 or answer.json()["output_ids"] != self._expected[which]:
                self.failures.append(f"{answer.status_code}: {answer.text[:300]}")
            self.served += 1

    def take_out(self, server: Server) -> None:
        with self._lock:
            self.in_service = [other for other in self.in_service if other is not server]

    def put_in(self, server: Server) -> None:
        with self._lock:
            self.in_service = [*self.in_service, server]


class Versions(NamedTuple):
    servers: Cluster
    model: Path
    old: Path
    expected: list[list[int]]

    def start(self, role: str, port_of: Server | None, *flags: str, old: bool) -> Server:
        """Start a server, of the older version if `old`, on the ports of the server that it replaces."""
        log = self.servers.directory / f"{len(self.servers.servers)}-{role}.log"
        env = {"PYTHONPATH": str(self.old)} if old else {}
        server = Server(role, self.model, log, *COMMON, *flags, env=env, forked=not old)
        if port_of is not None:
            server.port, server.bootstrap_port = port_of.port, port_of.bootstrap_port
        self.servers.servers.append(server)
        return server.start()


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "deepseek_v32"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    directory = tmp_path_factory.mktemp("upgrade")
    if request.param == "deepseek_v32":
        model = make_dsa_checkpoint(directory / "model", max_position_embeddings=512)
    else:
        model = make_checkpoint(directory / "model", request.param, max_position_embeddings=512)
    reference = load_reference(model)
    expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    base = find_base()
    print(f"this version with that of {git('log', '-1', '--format=%h %s', base)}")
    with cluster(directory) as servers:
        yield Versions(servers, model, build_wheel(base, directory), expected)


@pytest.mark.parametrize("staging", ["off", "on"])
def test_servers_are_replaced_one_by_one_without_a_failed_request(
    versions: Versions, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    monkeypatch.setattr(servers_module, "START_TIMEOUT_S", START_TIMEOUT_S)
    staged = ["--staging", staging]
    prefills = [versions.start("prefill", None, *staged, old=True) for _ in range(2)]
    endpoints = [*staged, *(flag for prefill in prefills for flag in ("--prefill", prefill.endpoint))]
    if staging == "on":
        endpoints += ["--staging-ring-mib", "0.0625"]
    decodes = [versions.start("decode", None, *endpoints, old=True) for _ in range(2)]
    for server in (*prefills, *decodes):
        server.wait_ready()
    for server in (*prefills, *decodes):
        server.wait_ready(peers=2)
    load = Load(versions.expected)
    load.in_service = list(decodes)
    load.start()
    try:
        load.wait_served()
        for old in (False, True):  # upgrade, then downgrade: each version is prefill and decode for the other
            for group, flags in ((prefills, staged), (decodes, endpoints)):
                for position, server in enumerate(group):
                    load.take_out(server)
                    assert server.stop() == 0
                    replacement = versions.start(server.role, server, *flags, old=old)
                    group[position] = replacement
                    replacement.wait_ready(peers=2)
                    if replacement.role == "decode":
                        load.put_in(replacement)
                    load.wait_served()
                    print(f"{server.role} {position}: {'older' if old else 'this'} version, {load.served} requests")
                    assert load.failures == [], f"after {server.role} {position} was replaced"
    finally:
        load.stop()
    assert load.failures == []
    staged_parts = 0
    for server in (*prefills, *decodes):
        assert HTTP.get(f"{server.url}/health", timeout=10).json()["reasons"] == []
        counters = server.settled_info()["counters"]
        assert (counters["integrity_errors"], counters.get("checksum_errors", 0)) == (0, 0)
        staged_parts += counters["staged_parts"]
        assert server.stop() == 0
    assert bool(staged_parts) == (staging == "on")
