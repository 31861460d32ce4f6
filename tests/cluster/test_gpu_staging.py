"""Staged pairs on one GPU: servers of one, two and four ranks that share it, over TCP and through CUDA IPC.

Each test starts the decode servers of one layout, and the prefill servers that it needs and that do not run yet.
"""

import functools
import random
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint, reference_greedy
from tests.cluster.servers import Cluster, Server, body, cluster, wait_until

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
NEW_TOKENS = 8
LENGTHS = (1, 17, 48, 131, 333)
CHUNK = 48
SOURCES = {1: (1, 2, 4), 2: (1, 4), 4: (2,)}
"""Tensor parallelism of decode, and of the prefill servers that it is paired with."""
TRANSPORTS = {"tcp": "tcp", "nvlink": "auto"}
"""Transport, and --transport of the prefill servers that use it. Decode servers accept both."""
PAGE_SIZES = {1: 16, 2: 8, 4: 64}
"""Page sizes of the decode servers; those of prefill servers are 16."""
TOKEN_BYTES = 3 * 2 * 4 * 16 * 4
"""Layers * (keys and values) * heads * dimensions * bytes."""
CLIENTS = 16


@dataclass(frozen=True)
class Model:
    directory: Path
    prompts: list[list[int]]

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        """The tokens of transformers. Computed on first use, while servers start."""
        reference = load_reference(self.directory)
        return [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in self.prompts]


class Source(NamedTuple):
    """Identifies a prefill server."""

    transport: str
    tp: int


class Prefills:
    """Prefill servers, started when a test first needs them."""

    def __init__(self, servers: Cluster, model: Model) -> None:
        self.servers = servers
        self.model = model
        self._started: dict[Source, Server] = {}

    def start(self, wanted: Iterable[Source]) -> dict[Source, Server]:
        """Start these servers where they do not run yet; does not wait until they are ready."""
        return {source: self._started.get(source) or self._start(source) for source in wanted}

    def _start(self, source: Source) -> Server:
        flags = ["--tp", str(source.tp), "--transport", TRANSPORTS[source.transport], "--chunk-size", str(CHUNK)]
        self._started[source] = add_server(self.servers, "prefill", self.model, flags)
        return self._started[source]


def add_server(servers: Cluster, role: str, model: Model, flags: list[str]) -> Server:
    common = ["--device", DEVICE, "--dtype", "float32", "--kv-tokens", "16384", "--no-prefix-cache"]
    return servers.add(role, model.directory, *common, *flags)


def add_decode(prefills: Prefills, sources: Iterable[Server], flags: list[str]) -> Server:
    endpoints = ",".join(source.endpoint for source in sources)
    return add_server(prefills.servers, "decode", prefills.model, ["--prefill", endpoints, *flags])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("gpu-staging-model"),
        "qwen3",
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
    )
    rng = random.Random(4)
    return Model(directory, [rng.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS])


@pytest.fixture(scope="module")
def prefills(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefills]:
    with cluster(tmp_path_factory.mktemp("gpu-staging-logs")) as servers:
        yield Prefills(servers, model)


@pytest.mark.parametrize("tp", SOURCES)
def test_tokens_equal_transformers_staged_or_not_over_tcp_and_cuda_ipc(prefills: Prefills, tp: int) -> None:
    """From every prefill server at once, with a decode server for each setting of `staging`."""
    sources = prefills.start(Source(transport, source_tp) for source_tp in SOURCES[tp] for transport in TRANSPORTS)
    flags = ["--tp", str(tp), "--page-size", str(PAGE_SIZES[tp])]
    decodes = {
        staging: add_decode(prefills, sources.values(), [*flags, "--staging", staging])
        for staging in ("on", "off", "auto")
    }
    assert len(prefills.model.expected) == len(LENGTHS)
    for decode in decodes.values():
        decode.wait_ready(peers=len(sources))
    before = counters(sources)
    for staging, decode in decodes.items():
        check_tokens(prefills.model, decode, sources)
        after = counters(sources)
        for source in sources:
            counted = {name: int(after[source][name] - before[source][name]) for name in after[source]}
            check_writes(counted, source.tp, tp, staging)
        before = after
    check_clean_and_nothing_staged([*decodes.values(), *sources.values()])
    for decode in decodes.values():
        assert decode.info()["counters"]["chunks_verified"] > 0
        log = decode.log.read_text()
        assert (f"ranks share {DEVICE}" in log) == (tp > 1)
        assert "CUDA graphs captured" in log
    for source, server in sources.items():
        routes = [line for line in server.log.read_text().splitlines() if "KV of rank" in line and "goes over" in line]
        assert routes
        assert all(line.endswith(f"goes over {source.transport}") for line in routes), routes
    stop_all(decodes.values())


def check_tokens(model: Model, decode: Server, sources: dict[Source, Server]) -> None:
    """Many prompts from every prefill server, all at once."""
    cases = [(source, number % len(LENGTHS)) for number in range(CLIENTS) for source in sources]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = [
            pool.submit(decode.generate, model.prompts[case], NEW_TOKENS, **sources[source].bootstrap)
            for source, case in cases
        ]
        found = [answer.result() for answer in answers]
    wrong = [
        (source, LENGTHS[case], output)
        for (source, case), output in zip(cases, found, strict=True)
        if output != model.expected[case]
    ]
    assert not wrong, decode.flags


def counters(sources: dict[Source, Server]) -> dict[Source, dict[str, float]]:
    """Counters of the leaders, including all events before this call."""
    return {source: server.settled_info()["counters"] for source, server in sources.items()}


def check_writes(counted: dict[str, int], source_tp: int, tp: int, staging: str) -> None:
    """Each pair of ranks that share heads stages a chunk in one part and one write, or stages nothing."""
    if staging == "off" or (staging == "auto" and source_tp == tp):
        assert counted["staged_parts"] == 0
        assert counted["transfer_writes"] >= counted["chunks"] * max(source_tp, tp)
    else:
        assert counted["transfer_writes"] == counted["staged_parts"] == counted["chunks"] * max(source_tp, tp)
        tokens = sum(LENGTHS[number % len(LENGTHS)] for number in range(CLIENTS))
        assert counted["transfer_bytes"] == counted["staged_bytes"] == tokens * TOKEN_BYTES


def check_clean_and_nothing_staged(servers: Collection[Server]) -> None:
    """All servers are clean, and no part is staged or waits for a ring."""
    for server in servers:
        server.check_clean()
    for server in servers:
        gauges = server.settled_info()["gauges"]
        assert gauges.get("staging_ring_bytes_granted", 0) == gauges.get("staging_parts", 0) == 0, gauges
        assert gauges.get("staging_parts_waiting", 0) == 0, gauges


def stop_all(servers: Iterable[Server]) -> None:
    """SIGTERM to all at once; all exit with 0."""
    processes = [server.process for server in servers if server.process is not None]
    for process in processes:
        process.terminate()
    assert not any(process.wait(30) for process in processes)


def test_two_stages_with_small_rings_survive_client_disconnects(prefills: Prefills) -> None:
    """Servers of four and of one prefill ranks write into the same rings of 32 KiB, about 36 tokens."""
    model = prefills.model
    sources = list(prefills.start([Source("nvlink", 4), Source("tcp", 1)]).values())
    flags = ["--pp", "2", "--staging", "on", "--staging-ring-mib", "0.03", "--page-size", "8", "--quarantine-s", "2"]
    decode = add_decode(prefills, sources, flags)
    assert len(model.expected) == len(LENGTHS)
    decode.wait_ready(peers=len(sources))
    rng = random.Random(11)
    plan = [(rng.randrange(len(LENGTHS)), rng.choice([0.02, 0.1, 0.3])) for _ in range(64)]

    def send(number: int) -> bool:
        """Half of the clients disconnect early. Returns whether a response came."""
        case, read_s = plan[number]
        with suppress(httpx.ReadTimeout):
            response = httpx.post(
                f"{decode.url}/generate",
                json=body(model.prompts[case], NEW_TOKENS, **sources[number // 2 % 2].bootstrap),
                timeout=httpx.Timeout(60, read=read_s if number % 2 else 60),
            )
            assert response.raise_for_status().json()["output_ids"] == model.expected[case]
            return True
        return False

    with ThreadPoolExecutor(CLIENTS) as pool:
        answered = list(pool.map(send, range(len(plan))))
    assert all(answered[::2])
    assert answered.count(False) > 5
    wait_until(lambda: decode.count("requests_aborted") > 0, 10, "a request was aborted")
    for source in sources:
        assert decode.generate(model.prompts[-1], NEW_TOKENS, **source.bootstrap) == model.expected[-1]
    assert decode.count("checksum_errors") == 0
    assert decode.count("staged_parts") > decode.count("chunks") * 4, "chunks did not take several parts"
    check_clean_and_nothing_staged([decode, *sources])
    stop_all([decode])
