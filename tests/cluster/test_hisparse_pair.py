"""HiSparse through real pairs: KV goes straight into decode's host memory, attention reads hot rows, tokens agree."""

import contextlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import DsaArchitecture, load_reference, make_checkpoint, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import HTTP, Cluster, Server, cluster, wait_until

TOPK = 16
NEW_TOKENS = 40
LENGTHS = (3, 15, 30, 60, 200, 300)
"""Within the hot buffer, crossing it while generating, and far beyond it."""
PAGE = 8
LAYERS = 4
LATENT_BYTES, INDEXER_BYTES = LAYERS * 64 * 4, LAYERS * 32 * 4
"""Of one token: rows of 48 + 16 and 32 floats."""
ALL_PAGES = sum(-(-(length + NEW_TOKENS - 1) // PAGE) for length in LENGTHS)
"""What all need at once. With no page more nothing is lent when all are there."""

PREFILL = ("--page-size", "16", "--chunk-size", "48", "--kv-tokens", "8192")


class Case(NamedTuple):
    """A model, and the share of its layers in the larger of two stages: layers with one index stay together."""

    architecture: DsaArchitecture
    overrides: dict[str, Any]
    largest_stage: float


CASES = {
    "deepseek": Case("deepseek_v32", {"index_head_dim": 32}, 0.5),
    "glm": Case("glm_moe_dsa", {"index_topk_pattern": "FSSF", "index_head_dim": 32}, 0.75),
}


class Source(NamedTuple):
    """A prefill server without any HiSparse setting, and what transformers says."""

    servers: Cluster
    case: Case
    model: Path
    prefill: Server
    prompts: list[list[int]]
    expected: list[list[int]]

    def decode(self, *flags: str, spare: Server | None = None) -> Server:
        """A decode server, paired with the prefill server and with a spare one."""
        endpoints = [server.endpoint for server in (self.prefill, spare) if server is not None]
        to_prefill = ("--prefill", ",".join(endpoints), "--page-size", str(PAGE))
        return self.servers.add("decode", self.model, *to_prefill, *flags).wait_ready(peers=len(endpoints))


def hisparse(hot_rows: int, hot_pages: int, kv_tokens: int = 4096, share: float = 1.0) -> list[str]:
    """Flags of a decode server whose hot pool has so many pages of its own; `share` of the layers are in the largest
    stage. The index of an even number of pages is whole hot pages.
    """
    device_bytes = (kv_tokens * INDEXER_BYTES + hot_pages * PAGE * LATENT_BYTES) * share
    gib = str((device_bytes + PAGE * LATENT_BYTES // 4) / (1 << 30))
    return [
        "--enable-hisparse",
        *("--hot-rows", str(hot_rows), "--kv-tokens", str(kv_tokens)),
        *("--kv-memory-gib", gib, "--host-memory-gib", "0.5"),
    ]


FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: both families; otherwise the one that also shares selections between layers."""


@pytest.fixture(scope="module", params=list(CASES) if FULL else ["glm"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(f"{request.param}-model")
    model = make_dsa_checkpoint(directory, case.architecture, index_topk=TOPK, **case.overrides)
    with cluster(tmp_path_factory.mktemp(f"{request.param}-logs")) as servers:
        prefill = servers.add("prefill", model, *PREFILL)
        draw = random.Random(3)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        yield Source(servers, case, model, prefill.wait_ready(), prompts, expected)


def ask_all(decode: Server, source: Source) -> list[list[int]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), source.prompts))


def metrics(server: Server) -> dict[str, float]:
    """What Prometheus would read, less what has labels."""
    families = text_string_to_metric_families(HTTP.get(f"{server.url}/metrics", timeout=5).text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.mark.parametrize(
    ("hot_rows", "layout"),
    [(TOPK, (1, 1)), (2 * TOPK, (2, 1)), (4 * TOPK, (1, 2))],
    ids=["k", "2k-tp2", "4k-pp2"],
)
def test_tokens_equal_transformers_with_a_buffer_far_smaller_than_the_context(
    source: Source, hot_rows: int, layout: tuple[int, int]
) -> None:
    """All at once: short and long ones, some resident at first, all of which shrink as the others come."""
    buffers = len(LENGTHS) * (hot_rows // PAGE + 1)
    tp, pp = layout
    share = source.case.largest_stage if pp == 2 else 1.0
    sizes = hisparse(hot_rows, buffers + 4, kv_tokens=ALL_PAGES * PAGE, share=share)
    decode = source.decode(*sizes, "--tp", str(tp), "--pp", str(pp))
    assert ask_all(decode, source) == source.expected
    assert ask_all(decode, source) == source.expected  # prompts come from the prefix cache, whose rows are shared
    counters = decode.settled_info()["counters"]
    assert counters["prefix_tokens_reused"] > 0
    assert counters["chunks_verified"] > 0
    decode.check_clean()
    check_metrics(metrics(decode))
    assert decode.stop() == 0


def check_metrics(found: dict[str, float]) -> None:
    """Of an idle server that has answered everybody twice."""
    steps = 2 * len(LENGTHS) * (NEW_TOKENS - 1)
    assert found["pdserve_hot_write_backs_total"] == steps * LAYERS
    misses, row_bytes = found["pdserve_hot_misses_total"], LATENT_BYTES // LAYERS
    assert misses > 0
    assert found["pdserve_hot_hits_total"] > 0
    assert misses * row_bytes <= found["pdserve_hot_bytes_swapped_in_total"] <= misses * row_bytes * LAYERS
    assert 0 < found["pdserve_decode_steps_total"] <= steps
    assert found["pdserve_hot_buffers"] == found["pdserve_hot_buffers_resident"] == 0
    assert found["pdserve_hot_pages_available"] == found["pdserve_hot_pages"] > 0
    assert found["pdserve_hot_pages_borrowed"] == 0
    assert found["pdserve_kv_pages_available"] == found["pdserve_kv_pages"] == ALL_PAGES
    assert found["pdserve_kv_pages_held"] == 0
    assert found["pdserve_integrity_errors_total"] == 0


def test_everything_is_resident_while_there_is_room(source: Source) -> None:
    decode = source.decode(*hisparse(2 * TOPK, 400))
    assert decode.generate(source.prompts[-1], 1) == source.expected[-1][:1]  # over when its KV arrives
    found: dict[str, float] = {}

    def in_use() -> bool:
        found.update(metrics(decode))
        return found["pdserve_hot_buffers"] > 0

    long_tokens = 400  # longer at work than a report of the leader takes
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(lambda: (ask_all(decode, source), ask_all(decode, source)))
        long = pool.submit(decode.generate, source.prompts[0], long_tokens)
        wait_until(in_use, 30, "hot buffers in use")
        assert answers.result(60) == (source.expected, source.expected)
        assert long.result(60)[:NEW_TOKENS] == source.expected[0]
    assert found["pdserve_hot_buffers_resident"] == found["pdserve_hot_buffers"]
    assert found["pdserve_hot_pages_available"] < found["pdserve_hot_pages"]
    assert found["pdserve_kv_pages_held"] > 0
    decode.check_clean()
    counters = decode.settled_info()["counters"]
    assert counters["hot_misses"] == counters["hot_hits"] == counters["hot_bytes_swapped_in"] == 0
    steps = 2 * len(LENGTHS) * (NEW_TOKENS - 1) + long_tokens - 1
    assert counters["hot_write_backs"] == steps * LAYERS
    assert decode.stop() == 0


def test_free_pages_of_keys_make_residents_until_somebody_needs_them(source: Source) -> None:
    """The hot pool has a buffer for everybody and nothing else. One that has the server for itself is resident; those
    who come then need all pages there are, and it goes on with its buffer.
    """
    long_tokens, buffers = 500, (len(LENGTHS) + 1) * (2 * TOPK // PAGE + 1)
    pages = ALL_PAGES + -(-(LENGTHS[0] + long_tokens - 1) // PAGE)
    flags = ("--no-prefix-cache", "--growth-tokens", str(long_tokens), "--max-running-requests", str(len(LENGTHS) + 1))
    decode = source.decode(*hisparse(2 * TOPK, buffers, kv_tokens=(pages + pages % 2) * PAGE), *flags)
    assert decode.generate(source.prompts[-1], NEW_TOKENS) == source.expected[-1]
    assert decode.count("hot_misses") == decode.count("hot_hits") == 0
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(decode.generate, source.prompts[0], long_tokens)
        wait_until(lambda: metrics(decode)["pdserve_hot_pages_borrowed"] > 0, 30, "a loan")
        assert ask_all(decode, source) == source.expected
        assert long.result(60)[:NEW_TOKENS] == source.expected[0]
    counters = decode.settled_info()["counters"]
    assert counters["hot_misses"] > 0
    assert counters["retractions"] == 0
    decode.check_clean()
    found = metrics(decode)
    assert found["pdserve_hot_pages_borrowed"] == 0
    assert found["pdserve_kv_pages_available"] == found["pdserve_kv_pages"] == pages + pages % 2
    assert decode.stop() == 0


def test_too_few_buffers_and_pages_queue_retract_and_refuse_but_never_fail(source: Source) -> None:
    """Two hot buffers, two request slots and pages for about two of the long prompts, for six requests, four that are
    aborted and some that are too long; and a prefill server that is killed.
    """
    spare = source.servers.add("prefill", source.model, *PREFILL)
    decode = source.decode(
        *hisparse(2 * TOPK, 2 * (2 * TOPK // PAGE + 1), kv_tokens=400),
        *("--growth-tokens", "8", "--no-prefix-cache", "--max-running-requests", "2", "--quarantine-s", "1"),
        spare=spare,
    )
    urgent = [{"priority": number % 3} for number in range(len(source.prompts))]
    with ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(decode.generate, prompt, NEW_TOKENS, **extra)
            for prompt, extra in zip(source.prompts, urgent, strict=True)
        ]
        for number, prompt in enumerate(source.prompts[2:]):
            with contextlib.suppress(httpx.TimeoutException):
                decode.post(prompt, 90, timeout_s=0.4)
            too_long = decode.post(source.prompts[-1], 200)
            assert too_long.status_code == 400
            assert "100 new tokens fit" in too_long.text
            if number == 1:
                spare.kill()
        assert [answer.result(60) for answer in answers] == source.expected
    wait_until(decode.idle, 15, "idle")
    counters = decode.settled_info()["counters"]
    assert counters["retractions"] > 0
    assert counters["requests_aborted"] > 0
    assert counters["requests_failed"] == 0
    assert counters["peers_lost"] == 1
    decode.check_clean()
    assert decode.stop() == 0


def test_a_dense_model_and_an_impossible_buffer_are_refused(source: Source, tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    refused = [
        (dense, [], "enable_hisparse needs a model with sparse attention"),
        (source.model, ["--hot-rows", "8"], "hot_rows = 8 is below the model's index_topk = 16"),
    ]
    if FULL:  # tests/memory has them, too
        refused += [
            (source.model, ["--hot-rows", "20"], "hot_rows = 20 must be a multiple of page_size = 8"),
            (source.model, ["--host-memory-gib", "9999"], "host_memory_gib = 9999"),
        ]
    servers = [
        Server("decode", model, tmp_path / f"{number}.log", "--page-size", "8", "--enable-hisparse", *flags).start()
        for number, (model, flags, _) in enumerate(refused)
    ]
    for server, (_, _, sentence) in zip(servers, refused, strict=True):
        assert server.process is not None
        assert server.process.wait(60) == 2
        assert sentence in server.log.read_text()
