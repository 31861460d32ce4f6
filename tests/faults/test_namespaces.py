"""Prefill, decode and the client each in a network namespace of its own: the network between them fails and heals.

Where there are no namespaces, the faults of links in `test_fault_cells.py`, with proxies, are all that is tested.
"""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import load_reference, make_checkpoint, reference_greedy
from tests.cluster.forkserver import NETNS_VARIABLE
from tests.cluster.servers import Cluster, Server, cluster, wait_until
from tests.faults.namespaces import Network, why_unavailable

PROMPT = [(3 + 7 * index) % 251 for index in range(97)]
NEW_TOKENS = 16
COMMON = ("--page-size", "8", "--no-prefix-cache", "--kv-tokens", "1024", "--shutdown-timeout-s", "1")
DECODE = (*COMMON, "--quarantine-s", "1.5", "--request-timeout-s", "20")
DATA_PORTS = "15000-17000"
LOST_S = 10.0
"""A loss is noticed within 2 s and answered within 3 s; test machines are busy."""


class Hosts(NamedTuple):
    network: Network
    servers: Cluster
    model: Path
    prefill: Server
    decode: Server
    expected: list[int]

    def wait_ready(self) -> None:
        for server in (self.prefill, self.decode):
            self.network.call("client", lambda server=server: server.wait_ready(peers=1))  # type: ignore[misc]

    def generate(self) -> int:
        """The status of a request of the client; checks its tokens."""
        response = self.network.call("client", lambda: self.decode.post(PROMPT, NEW_TOKENS))
        assert response.status_code in (200, 503), response.text
        if response.status_code == 200:
            assert response.json()["output_ids"] == self.expected
        return response.status_code

    def check_healed(self) -> None:
        self.wait_ready()
        assert self.generate() == 200
        for server in (self.prefill, self.decode):
            self.network.call("client", lambda server=server: wait_until(server.idle, 20, server.role))  # type: ignore[misc]
            counters = self.network.call("client", lambda server=server: server.settled_info()["counters"])  # type: ignore[misc]
            assert (counters["integrity_errors"], counters.get("checksum_errors", 0)) == (0, 0)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if (reason := why_unavailable()) is not None:
        pytest.skip(f"no network namespaces here ({reason}): links are tested with proxies only")
    directory = tmp_path_factory.mktemp("namespaces")
    model = make_checkpoint(directory / "model", "llama", max_position_embeddings=512)
    with Network("prefill", "decode", "client") as network, cluster(directory) as servers:
        key = secrets.token_hex(32)

        def env(host: str) -> dict[str, str]:
            return {NETNS_VARIABLE: network.name(host), "PDSERVE_CLUSTER_KEY": key}

        prefill = servers.add(
            "prefill", model, *COMMON, "--chunk-size", "32", "--host", network.address("prefill"), env=env("prefill")
        )
        where = ("--host", network.address("decode"), "--prefill", prefill.endpoint)
        decode = servers.add("decode", model, *DECODE, *where, env=env("decode"))
        expected = reference_greedy(load_reference(model), PROMPT, NEW_TOKENS)
        started = Hosts(network, servers, model, prefill, decode, expected)
        started.check_healed()
        yield started


FAULTS: dict[str, Callable[[Hosts], AbstractContextManager[None]]] = {
    "prefill is cut off": lambda hosts: hosts.network.cut("prefill"),
    "packets from prefill to decode are lost": lambda hosts: hosts.network.one_way("prefill", "decode"),
    "packets from decode to prefill are lost": lambda hosts: hosts.network.one_way("decode", "prefill"),
    "the control port is blocked": lambda hosts: hosts.network.without_ports(str(hosts.prefill.bootstrap_port)),
    "the data ports are blocked": lambda hosts: hosts.network.without_ports(DATA_PORTS),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_request_ends_and_the_pair_recovers(
    hosts: Hosts, fault: Callable[[Hosts], AbstractContextManager[None]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with fault(hosts):
            assert pool.submit(hosts.generate).result(4 * LOST_S) == 503, "the fault did not reach the request"
        hosts.check_healed()


def test_client_that_was_cut_off_gets_its_answer(hosts: Hosts) -> None:
    """TCP delivers the answer when the network is back."""
    with ThreadPoolExecutor(1) as pool:
        with hosts.network.one_way("decode", "client"):
            answer = pool.submit(hosts.generate)
            with pytest.raises(TimeoutError):
                answer.result(1.0)
        assert answer.result(4 * LOST_S) == 200
    hosts.check_healed()


def test_decode_serves_at_a_new_address_after_a_restart(hosts: Hosts) -> None:
    network, decode = hosts.network, hosts.decode
    before = decode.flags[:]
    assert decode.stop() == 0
    decode.host = network.address("decode", second=True)
    decode.flags[decode.flags.index("--host") + 1] = decode.host
    decode.start()
    hosts.check_healed()
    assert decode.flags != before
