"""Faults of the network between prefill, decode, a router and a client, each in its own network namespace.

Where namespaces, netem or iptables are missing, the tests that need them are skipped with the reason. The faults of
links in `test_fault_cells.py`, delay and loss among them, use TCP proxies and run everywhere.
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
from tests.cluster.servers import Cluster, Server, body, cluster, wait_until
from tests.cluster.test_routers import Router
from tests.faults.namespaces import Network, why_no_iptables, why_no_netem, why_unavailable

PROMPT = [(3 + 7 * index) % 251 for index in range(97)]
NEW_TOKENS = 16
COMMON = ("--page-size", "8", "--no-prefix-cache", "--kv-tokens", "1024", "--shutdown-timeout-s", "1")
DECODE = (*COMMON, "--quarantine-s", "1.5", "--request-timeout-s", "20")
DATA_PORTS = "15000-17000"
LOST_S = 10.0
"""Servers notice a loss within 2 s and answer within 3 s; test machines are busy."""


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
        """Send a request from the client and check its tokens. Returns the status."""
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
    with Network("prefill", "decode", "client", "router") as network, cluster(directory) as servers:
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


@pytest.fixture(scope="module")
def router(hosts: Hosts) -> Iterator[Router]:
    network = hosts.network
    started = Router(
        "sglang_router",
        hosts.prefill,
        [hosts.decode],
        hosts.servers.directory / "router.log",
        host=network.address("router"),
        launcher=("ip", "netns", "exec", network.name("router")),
    )
    try:
        network.call("client", started.wait_ready)
        yield started
    finally:
        started.close()


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
            assert pool.submit(hosts.generate).result(4 * LOST_S) == 503, "the request was served despite the fault"
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


def test_router_that_was_cut_off_serves_again(hosts: Hosts, router: Router) -> None:
    network = hosts.network

    def through_router() -> int:
        response, _ = network.call("client", lambda: router.post("/generate", body(PROMPT, NEW_TOKENS)))
        assert response.status_code != 200 or response.json()["output_ids"] == hosts.expected
        return response.status_code

    assert through_router() == 200
    with ThreadPoolExecutor(1) as pool:
        with network.one_way("decode", "router"):
            response = pool.submit(through_router)
            with pytest.raises(TimeoutError):
                response.result(1.0)
            assert hosts.generate() == 200, "a request that does not go through the router failed"
        assert response.result(4 * LOST_S) in (200, 502, 503)
    wait_until(lambda: through_router() == 200, 4 * LOST_S, "requests through the router")
    hosts.check_healed()


@pytest.mark.parametrize("means", ["netem", "iptables"])
def test_requests_are_answered_despite_delay_and_loss(hosts: Hosts, means: str) -> None:
    """netem delays and loses packets, iptables only loses them."""
    reason = why_no_netem() if means == "netem" else why_no_iptables()
    if reason is not None:
        pytest.skip(f"no {means} here: {reason}")
    statuses: list[int] = []
    if means == "netem":
        with hosts.network.netem(delay_ms=20, loss=0.02):
            statuses += [hosts.generate() for _ in range(5)]
    else:
        with hosts.network.losing(0.02) as lost:
            while lost() < 5 and len(statuses) < 50:
                statuses.append(hosts.generate())
            assert lost() >= 5
    assert 200 in statuses
    hosts.check_healed()


def test_decode_serves_at_a_new_address_after_a_restart(hosts: Hosts) -> None:
    network, decode = hosts.network, hosts.decode
    assert decode.stop() == 0
    decode.host = network.address("decode", second=True)
    decode.flags[decode.flags.index("--host") + 1] = decode.host
    decode.start()
    hosts.check_healed()
