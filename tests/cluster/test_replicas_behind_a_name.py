"""Prefill servers come and go behind one host name, as the pods of a headless Service of Kubernetes: decode has its own
resolv.conf in a mount namespace, and the answer of its name server changes.
"""

import itertools
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests.cluster.name_server import NameServer
from tests.cluster.servers import Cluster, Server, wait_until

POOL = ("--kv-tokens", "2048", "--no-prefix-cache")
TAKES_PART_S = 5.0
KEY = {"PDSERVE_CLUSTER_KEY": "a-secret-of-32-characters-or-more"}


def why_unavailable() -> str | None:
    """Why there are no mount namespaces here, or no port 53."""
    command = ["unshare", "--mount", "sh", "-c", "mount --bind /dev/null /etc/resolv.conf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip()
    try:
        with NameServer("prefill", []):
            return None
    except OSError as error:
        return f"port 53 of {NameServer.HOST}: {error.strerror}"


class Load:
    """Requests of several clients: with one request at a time, the first server has time for all."""

    def __init__(self, decode: Server) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._decode, self._stop = decode, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(6)]

    def _run(self, client: int) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            try:
                response = self._decode.post([client + 1, 1 + number % 200, *range(2, 98)], 2)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            if response.status_code == 200:
                self.answered += 1
            else:
                self.failures.append(response.text)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_servers_behind_a_name_come_and_go_without_a_failed_request(
    servers: Cluster, llama: Path, tmp_path: Path
) -> None:
    if (reason := why_unavailable()) is not None:
        pytest.skip(f"no mount namespaces or no name server here ({reason}): tests/transfer has names without them")

    def prefill(number: int) -> Server:
        return servers.add("prefill", llama, *POOL, "--host", f"127.0.0.{number}", env=KEY)

    first = prefill(2)
    with NameServer("prefill", ["127.0.0.2"]) as names:
        decode = Server(
            "decode",
            llama,
            tmp_path / "decode.log",
            *POOL,
            *("--prefill", f"prefill:{first.bootstrap_port}", "--prefill-wait-s", "30"),
            env=KEY,
            launcher=names.launcher(tmp_path),
        )
        servers.servers.append(decode.start())
        first.wait_ready()
        decode.wait_ready(peers=1)
        second = Server("prefill", llama, tmp_path / "second.log", *POOL, "--host", "127.0.0.3", env=KEY)
        second.bootstrap_port = first.bootstrap_port  # as all pods have
        servers.servers.append(second.start())
        second.wait_ready()
        with Load(decode) as load:
            names.addresses.append("127.0.0.3")
            wait_until(lambda: second.count("requests_finished") > 0, TAKES_PART_S, "the new server takes part")
            names.addresses.remove("127.0.0.2")  # Kubernetes removes the address first, and then ends the pod
            asked = names.asked
            wait_until(lambda: names.asked > asked + 2, 10, "decode knows")
            assert first.process is not None
            first.process.send_signal(signal.SIGTERM)
            wait_until(lambda: [peer["address"] for peer in decode.info()["peers"]] == ["127.0.0.3"], 20, "forgotten")
            answered = load.answered
            wait_until(lambda: load.answered > answered + 3, 20, "answers of the server that is left")
        assert load.failures == []
        assert first.process.wait(20) == 0
    decode.check_clean()
    second.check_clean()
