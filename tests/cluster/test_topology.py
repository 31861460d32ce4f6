"""Several servers: pairing in any order, many to many, refusals, authentication, and requests as routers send them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import GreedyTokens, load_reference, make_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until

PROMPTS = [[index, 2 * index + 1, 7] for index in range(8)]
POOL = ("--kv-tokens", "2048")


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[GreedyTokens]:
    reference = load_reference(llama)
    return [GreedyTokens(reference, prompt, 6) for prompt in PROMPTS]


def peer_details(server: Server) -> list[tuple[str, str | None]]:
    return [(peer["state"], peer["detail"]) for peer in server.info()["peers"]]


@pytest.fixture(scope="module")
def square(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], list[Server]]]:
    """Two decode servers, started first, and two prefill servers."""
    with cluster(tmp_path_factory.mktemp("square")) as servers:
        prefills = [Server("prefill", llama, servers.directory / f"prefill-{index}.log", *POOL) for index in range(2)]
        endpoints = ",".join(prefill.endpoint for prefill in prefills)
        decodes = [servers.add("decode", llama, "--prefill", endpoints, *POOL) for _ in range(2)]
        for decode in decodes:
            decode.wait_ready(peers=0)
        for prefill in prefills:
            servers.servers.append(prefill.start())
        for server in [*prefills, *decodes]:
            server.wait_ready(peers=2)
        yield prefills, decodes
        for server in [*prefills, *decodes]:
            server.check_clean()


def test_every_decode_uses_every_prefill(
    square: tuple[list[Server], list[Server]], expected: list[GreedyTokens]
) -> None:
    prefills, decodes = square
    for decode in decodes:  # one request, so that several prompts wait at the same time
        answers = HTTP.post(f"{decode.url}/generate", json=body(PROMPTS, 6), timeout=60).raise_for_status().json()
        assert [answer["output_ids"] for answer in answers] == expected
    assert all(prefill.count("requests_finished") > 0 for prefill in prefills)


def test_bootstrap_fields_pin_the_prefill_server(
    square: tuple[list[Server], list[Server]], expected: list[GreedyTokens]
) -> None:
    """A router sends the same body, with the room, to both sides at once."""
    prefills, decodes = square
    for number, prefill in enumerate(prefills):
        room: dict[str, Any] = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": 2**60 + number,
        }
        before = prefill.count("requests_finished")
        with ThreadPoolExecutor(2) as pool:
            legs = [pool.submit(side.post, PROMPTS[3], 6, **room) for side in (prefill, decodes[0])]
            checked, answered = (leg.result().raise_for_status().json() for leg in legs)
        assert answered["output_ids"] == expected[3]
        assert (checked["output_ids"], checked["meta_info"]["prompt_tokens"]) == ([], len(PROMPTS[3]))
        assert prefill.count("requests_finished") == before + 1, "another prefill server computed the prompt"


def test_batch_takes_a_list_of_rooms(square: tuple[list[Server], list[Server]], expected: list[GreedyTokens]) -> None:
    (prefill, _), (decode, _) = square
    rooms = {
        "bootstrap_host": ["127.0.0.1"] * len(PROMPTS),
        "bootstrap_port": [prefill.bootstrap_port] * len(PROMPTS),
        "bootstrap_room": list(range(100, 100 + len(PROMPTS))),
    }
    with ThreadPoolExecutor(2) as pool:
        legs = [
            pool.submit(HTTP.post, f"{side.url}/generate", json=body(PROMPTS, 6, **rooms), timeout=60)
            for side in (prefill, decode)
        ]
        checked, answered = (leg.result().raise_for_status().json() for leg in legs)
    assert [result["output_ids"] for result in answered] == expected
    assert [result["output_ids"] for result in checked] == [[]] * len(PROMPTS)


def test_prefill_refuses_requests_without_a_room(square: tuple[list[Server], list[Server]]) -> None:
    prefills, _ = square
    response = prefills[0].post(PROMPTS[0], 1)
    assert response.status_code == 400
    assert "bootstrap_room" in response.json()["error"]["message"]


def test_health_generate_goes_through_the_pair(square: tuple[list[Server], list[Server]]) -> None:
    _, decodes = square
    before = decodes[0].count("transfers")
    assert HTTP.get(f"{decodes[0].url}/health_generate", timeout=10).status_code == 200
    assert decodes[0].count("transfers") == before + 1


def test_request_pinned_to_a_missing_prefill_responds_503(square: tuple[list[Server], list[Server]]) -> None:
    _, decodes = square
    room: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    response = decodes[1].post(PROMPTS[0], 1, **room)
    assert response.status_code == 503
    assert "127.0.0.1:1" in response.json()["error"]["message"]
    assert "retry-after" in response.headers


def test_servers_with_different_models_refuse_to_pair(servers: Cluster, llama: Path, tmp_path: Path) -> None:
    """Both keep running and report the reason. Decode pairs when a matching prefill server starts at that address."""
    other = make_checkpoint(tmp_path / "another-model", "llama", seed=1)
    prefill = servers.add("prefill", other, *POOL)
    decode = servers.add("decode", llama, "--prefill", prefill.endpoint, *POOL)
    prefill.wait_ready()
    decode.wait_ready()
    wait_until(lambda: [state for state, _ in peer_details(decode)] == ["refused"], 10, "refused")
    ((_, reason),) = peer_details(decode)
    assert reason is not None
    assert "another-model" in reason
    assert llama.name in reason
    wait_until(lambda: "models differ" in prefill.log.read_text(), 10, "prefill logs it")
    assert decode.post(PROMPTS[0], 1).status_code == 503
    assert prefill.stop() == 0
    prefill.model = str(llama)
    prefill.start().wait_ready(peers=1)
    decode.wait_ready(peers=1)
    assert len(decode.generate(PROMPTS[0], 3)) == 3


def test_decode_reports_why_it_has_no_prefill_server(servers: Cluster, llama: Path) -> None:
    """In the log, in /health (which stays 200) and in the response. Here --prefill names the HTTP port."""
    prefill = servers.add("prefill", llama, *POOL)
    prefill.wait_ready()
    decode = servers.add("decode", llama, "--prefill", f"127.0.0.1:{prefill.port}", *POOL)
    decode.wait_ready(peers=0)
    why = f"127.0.0.1:{prefill.port}: that is an HTTP port"
    wait_until(lambda: f"no prefill server is paired: {why}" in decode.log.read_text(), 10, "logged")
    health = HTTP.get(f"{decode.url}/health", timeout=5)
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert why in health.json()["warnings"][0]
    refused = decode.post(PROMPTS[0], 1)
    assert refused.status_code == 503
    assert why in refused.json()["error"]["message"]


def test_peer_that_stops_cleanly_causes_no_warning(servers: Cluster, llama: Path) -> None:
    prefill, decode = servers.pair(llama, POOL, POOL)
    second = servers.add("decode", llama, "--prefill", prefill.endpoint, *POOL).wait_ready(peers=1)
    assert second.stop() == 0
    wait_until(lambda: "has stopped" in prefill.log.read_text(), 10, "prefill logs it")
    assert prefill.stop() == 0
    wait_until(lambda: "has stopped" in decode.log.read_text(), 10, "decode logs it")
    warnings = [line for server in (prefill, decode) for line in server.log.read_text().splitlines() if " W " in line]
    assert [line for line in warnings if "no prefill server is paired" not in line] == []


def knows_reason(outsider: Server) -> bool:
    return "cluster_key" in str(peer_details(outsider))


def test_cluster_key_is_required_and_checked(servers: Cluster, llama: Path, expected: list[GreedyTokens]) -> None:
    key = {"PDSERVE_CLUSTER_KEY": "a-secret-of-32-characters-or-more"}
    wrong = {"PDSERVE_CLUSTER_KEY": "another secret of another cluster"}
    prefill = servers.add("prefill", llama, *POOL, env=key)
    prefill.wait_ready()
    member = servers.add("decode", llama, "--prefill", prefill.endpoint, *POOL, env=key)
    intruder = servers.add("decode", llama, "--prefill", prefill.endpoint, *POOL, env=wrong)
    keyless = servers.add("decode", llama, "--prefill", prefill.endpoint, *POOL)
    member.wait_ready(peers=1)
    assert member.generate(PROMPTS[0], 6) == expected[0]
    for outsider in (intruder, keyless):
        outsider.wait_ready(peers=0)
        wait_until(partial(knows_reason, outsider), 10, "the reason is known")
        assert outsider.post(PROMPTS[0], 1).status_code == 503
    prefill.wait_ready(peers=1)
    assert "a-secret-of" not in prefill.log.read_text() + member.log.read_text() + str(member.info())
