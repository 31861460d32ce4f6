"""Real pairs with different tensor parallelism: tokens equal transformers, each part is one write, rings are empty at
the end."""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference, make_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until

NEW_TOKENS = 8
LENGTHS = (1, 17, 48, 131, 333)
FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every combination; otherwise a few that cover staged and direct transfers."""
PREFILL_TP = (1, 2, 4) if FULL else (1, 4)
DECODE: tuple[tuple[int, str], ...] = ((1, "auto"), (1, "off"), (2, "on"))
"""Ranks and --staging of the decode servers."""
if FULL:
    DECODE = tuple((tp, staging) for tp in (1, 2, 4) for staging in ("auto", "on", "off"))
PAGE_SIZES = {1: 16, 2: 8, 4: 64}
"""Page sizes of the decode servers; those of prefill servers are 16."""
TOKEN_BYTES = 3 * 2 * 4 * 16 * 4
"""Layers * (keys and values) * heads * dimensions * bytes."""
SMALL_RING = ["--staging-ring-mib", "0.03", "--page-size", "8", "--no-prefix-cache", "--quarantine-s", "2"]
"""A ring of 32 KiB holds about 20 to 40 tokens."""


class Model(NamedTuple):
    directory: Path
    prompts: list[list[int]]
    expected: list[GreedyTokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("staging-model"),
        "qwen3",
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=8192,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )
    rng = random.Random(4)
    prompts = [rng.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    reference = load_reference(directory)
    return Model(directory, prompts, [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module")
def prefills(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[int, Server]]]:
    with cluster(tmp_path_factory.mktemp("staging-logs")) as servers:
        started = {tp: add_prefill(servers, model, tp) for tp in PREFILL_TP}
        for server in started.values():
            server.wait_ready()
        yield servers, started


def add_prefill(servers: Cluster, model: Model, tp: int) -> Server:
    flags = ["--tp", str(tp), "--kv-tokens", "16384", "--chunk-size", "48", "--no-prefix-cache"]
    return servers.add("prefill", model.directory, *flags)


def add_decode(servers: Cluster, model: Model, sources: list[Server], *flags: str) -> Server:
    endpoints = ",".join(source.endpoint for source in sources)
    decode = servers.add("decode", model.directory, "--prefill", endpoints, "--kv-tokens", "16384", *flags)
    return decode.wait_ready(peers=len(sources))


def check_nothing_staged(*servers: Server) -> None:
    for server in servers:
        gauges = server.settled_info()["gauges"]
        assert gauges.get("staging_ring_bytes_granted", 0) == gauges.get("staging_parts", 0) == 0, gauges
        assert gauges.get("staging_parts_waiting", 0) == 0, gauges


@pytest.mark.parametrize(("tp", "staging"), DECODE, ids=lambda value: str(value))
def test_tokens_equal_transformers_and_each_part_is_one_write(
    prefills: tuple[Cluster, dict[int, Server]], model: Model, tp: int, staging: str
) -> None:
    """Ten requests at once from each prefill server. Ranks that share heads stage each chunk as one part."""
    servers, sources = prefills
    flags = ["--tp", str(tp), "--page-size", str(PAGE_SIZES[tp]), "--staging", staging, "--no-prefix-cache"]
    decode = add_decode(servers, model, list(sources.values()), *flags)
    for source_tp, source in sources.items():
        before = source.settled_info()["counters"]
        cases = [index % len(LENGTHS) for index in range(10)]
        with ThreadPoolExecutor(10) as pool:
            answers = [pool.submit(decode.post, model.prompts[case], NEW_TOKENS, **source.bootstrap) for case in cases]
            found = [answer.result().raise_for_status().json()["output_ids"] for answer in answers]
        assert found == [model.expected[case] for case in cases]
        after = source.settled_info()["counters"]
        counted = {name: int(after[name] - before[name]) for name in after}
        if staging == "off" or (staging == "auto" and source_tp == tp):
            assert counted["staged_parts"] == 0
            assert counted["transfer_writes"] >= counted["chunks"] * max(source_tp, tp)
        else:
            assert counted["transfer_writes"] == counted["staged_parts"] == counted["chunks"] * max(source_tp, tp)
            assert counted["transfer_bytes"] == counted["staged_bytes"] == counted["transport_bytes_tcp"]
            assert counted["transfer_bytes"] == sum(LENGTHS[case] for case in cases) * TOKEN_BYTES
    assert decode.count("chunks_verified") > 0
    check_nothing_staged(decode, *sources.values())
    decode.check_clean()
    assert decode.stop() == 0


def test_ring_smaller_than_a_request_survives_client_disconnects(
    prefills: tuple[Cluster, dict[int, Server]], model: Model
) -> None:
    """Servers of one and of four prefill ranks write into the same two rings."""
    servers, sources = prefills
    both = [sources[1], sources[4]]
    decode = add_decode(servers, model, both, *SMALL_RING, "--tp", "2")
    rng = random.Random(11)
    plan = [(rng.randrange(len(LENGTHS)), rng.choice([0.02, 0.1, 0.3])) for _ in range(48)]

    def send(number: int) -> bool:
        """Half of the clients disconnect early. Returns whether a response came."""
        case, read_s = plan[number]
        with suppress(httpx.ReadTimeout):
            response = HTTP.post(
                f"{decode.url}/generate",
                json=body(model.prompts[case], NEW_TOKENS, **both[number // 2 % 2].bootstrap),
                timeout=httpx.Timeout(60, read=read_s if number % 2 else 60),
            )
            assert response.raise_for_status().json()["output_ids"] == model.expected[case]
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        answered = list(pool.map(send, range(len(plan))))
    assert all(answered[::2])
    wait_until(lambda: decode.count("requests_aborted") > 0, 10, "a request was aborted")
    assert answered.count(False) > 5
    for source in both:
        before = source.count("staged_parts")
        assert decode.generate(model.prompts[-1], NEW_TOKENS, **source.bootstrap) == model.expected[-1]
        assert source.count("staged_parts") > before
    assert decode.count("checksum_errors") == 0
    assert decode.count("staged_parts") > decode.count("chunks") * 4, "chunks did not take several parts"
    for server in (decode, *both):
        server.check_clean()
    check_nothing_staged(decode, *both)
    assert decode.stop() == 0


def test_killed_prefill_leaves_nothing_in_the_staging_ring(
    prefills: tuple[Cluster, dict[int, Server]], model: Model
) -> None:
    servers, sources = prefills
    killed = add_prefill(servers, model, 2).wait_ready()
    decode = add_decode(servers, model, [killed, sources[1]], *SMALL_RING, "--staging", "on")
    prompt = random.Random(5).choices(range(VOCAB_SIZE), k=6000)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(decode.post, prompt, 1, **killed.bootstrap) for _ in range(4)]
        wait_until(lambda: decode.info()["gauges"]["staging_ring_bytes_granted"] > 0, 30, "KV is staged")
        killed.kill()
        killed_at = time.monotonic()
        for answer in answers:
            assert answer.result(30).status_code == 503
        assert time.monotonic() - killed_at < 15
    decode.check_clean()
    check_nothing_staged(decode)
    assert decode.generate(model.prompts[-1], NEW_TOKENS) == model.expected[-1]
    decode.check_clean()
    assert decode.stop() == 0
