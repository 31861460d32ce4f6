"""HiSparse on real pairs: prefill writes KV to host memory of decode, and tokens equal those of transformers."""

import contextlib
import os
import queue
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.transfer.control.events import Event, MessageReceived
from pdserve.transfer.control.prefill import PrefillControl
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Hello,
    InstanceId,
    KvDestination,
    Welcome,
)
from tests.checkpoints import DsaArchitecture, GreedyTokens, load_reference, make_checkpoint, make_dsa_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.ports import free_port

TOPK = 16
NEW_TOKENS = 8
LENGTHS = (3, 15, 30, 60, 200, 300)
"""Within the hot buffer, crossing it while generating, and far beyond it."""
PAGE = 8
LAYERS = 3
ROW_BYTES, KEY_BYTES = 64 * 4, 32 * 4
"""Bytes per token: 48 + 16 floats in each layer, 32 floats for each indexer."""
ALL_PAGES = sum(-(-(length + NEW_TOKENS - 1) // PAGE) for length in LENGTHS)
"""Pages for all prompts at once. With exactly these, no page is lent while all run."""
TWO_LENGTH, TWO_TOKENS, GROWTH_TOKENS = 328, 16, 8
"""Two prompts of this length fit into ALL_PAGES with their first growth, but not up to their last token. They run long
enough to run together.
"""
TWO_BEGUN, TWO_ENDED = (-(-(TWO_LENGTH + tokens) // PAGE) for tokens in (GROWTH_TOKENS, TWO_TOKENS - 1))
"""Pages of one of them, at its first growth and at its end."""

PREFILL = ("--page-size", "16", "--chunk-size", "48", "--kv-tokens", "8192")


class Case(NamedTuple):
    """A model. `largest_stage` has, by number of stages, layers and indexers of the largest one; layers that share a
    selection are on the same stage. `seed` gives prompts for which no two tokens at the border of a selection have
    nearly equal scores: rounding would choose between them.
    """

    architecture: DsaArchitecture
    overrides: dict[str, Any]
    largest_stage: dict[int, tuple[int, int]]
    seed: int

    def hisparse(
        self, hot_rows: int, hot_pages: int, kv_tokens: int = 4096, pp: int = 1, page_size: int = PAGE
    ) -> list[str]:
        """Flags of a decode server with an index for `kv_tokens` tokens and `hot_pages` hot pages beside it."""
        layers, indexers = self.largest_stage[pp]
        page_bytes = page_size * layers * ROW_BYTES
        covered = -(-kv_tokens * indexers * KEY_BYTES // page_bytes)
        return [
            "--enable-hisparse",
            *("--page-size", str(page_size), "--pp", str(pp)),
            *("--hot-rows", str(hot_rows), "--kv-tokens", str(kv_tokens), "--host-memory-gib", "0.5"),
            *("--kv-memory-gib", str((covered + hot_pages + 0.25) * page_bytes / (1 << 30))),
        ]


CASES = {
    "deepseek": Case("deepseek_v32", {}, {1: (3, 3), 2: (2, 2)}, seed=4),
    "glm": Case("glm_moe_dsa", {"index_topk_pattern": "FSF"}, {1: (3, 2), 2: (2, 1)}, seed=3),
}


class Source(NamedTuple):
    """A prefill server without HiSparse settings, prompts, and the tokens of transformers."""

    servers: Cluster
    case: Case
    model: Path
    prefill: Server
    prompts: list[list[int]]
    expected: list[GreedyTokens]
    two: list[list[int]]
    """Prompts of TWO_LENGTH tokens."""
    expected_of_two: list[GreedyTokens]
    reference: Any

    def decode(self, *flags: str, spare: Server | None = None) -> Server:
        """Start a decode server that is paired with the prefill server and with `spare`."""
        endpoints = [server.endpoint for server in (self.prefill, spare) if server is not None]
        to_prefill = ("--prefill", ",".join(endpoints))
        return self.servers.add("decode", self.model, *to_prefill, *flags).wait_ready(peers=len(endpoints))


FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: both families; otherwise the one that also shares selections between layers."""


@pytest.fixture(scope="module", params=list(CASES) if FULL else ["glm"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(f"{request.param}-model")
    model = make_dsa_checkpoint(
        directory, case.architecture, index_topk=TOPK, num_hidden_layers=LAYERS, **case.overrides
    )
    with cluster(tmp_path_factory.mktemp(f"{request.param}-logs")) as servers:
        prefill = servers.add("prefill", model, *PREFILL)
        draw = random.Random(case.seed)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
        two = [draw.choices(range(256), k=TWO_LENGTH) for _ in range(2)]
        expected_of_two = [GreedyTokens(reference, prompt, TWO_TOKENS) for prompt in two]
        prefill.wait_ready()
        yield Source(servers, case, model, prefill, prompts, expected, two, expected_of_two, reference)


def generate_all(decode: Server, source: Source) -> list[list[int]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), source.prompts))


def check_misses(server: Server) -> None:
    """Rows were swapped in. Ranks report their counters to the leader from time to time."""
    wait_until(lambda: server.info()["counters"]["hot_misses"] > 0, 10, "misses are reported")


def metrics(server: Server) -> dict[str, float]:
    """All metrics without labels."""
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
    """Short and long prompts at once. Some are fully resident at first; all become evicting as others arrive."""
    buffers = len(LENGTHS) * (hot_rows // PAGE + 1)
    tp, pp = layout
    sizes = source.case.hisparse(hot_rows, max(buffers + 4, TWO_ENDED), kv_tokens=ALL_PAGES * PAGE, pp=pp)
    decode = source.decode(*sizes, "--tp", str(tp), "--growth-tokens", str(GROWTH_TOKENS))
    assert generate_all(decode, source) == source.expected
    assert generate_all(decode, source) == source.expected  # from the prefix cache, with shared rows
    counters = decode.settled_info()["counters"]
    assert counters["prefix_tokens_reused"] > 0
    assert counters["chunks_verified"] > 0
    decode.check_clean()
    written = 2 * len(LENGTHS) * (NEW_TOKENS - 1) * LAYERS
    wait_until(lambda: metrics(decode)["pdserve_hot_write_backs_total"] >= written, 5, "ranks report their last steps")
    check_metrics(metrics(decode))
    check_conversation(decode, source)
    check_retraction(decode, source)
    assert decode.stop() == 0


def check_conversation(decode: Server, source: Source) -> None:
    """Rows that decode has written back to host memory are reused as a prefix, like those that prefill wrote."""
    prompt, answer = source.prompts[-1], list(source.expected[-1])
    HTTP.post(f"{decode.url}/flush_cache").raise_for_status()
    assert decode.generate(prompt, NEW_TOKENS) == answer
    before = decode.count("prefix_tokens_reused")
    assert decode.generate(prompt + answer, NEW_TOKENS) == GreedyTokens(source.reference, prompt + answer, NEW_TOKENS)
    assert decode.count("prefix_tokens_reused") - before == len(prompt + answer[:-1]) // PAGE * PAGE
    decode.check_clean()


def check_retraction(decode: Server, source: Source) -> None:
    """One of two requests is retracted before either has finished. When the other one ends, it resumes fully resident,
    with a hot buffer that has none of its rows yet. On a busy machine, one may end before the other begins: try again.
    """
    assert 2 * TWO_BEGUN <= ALL_PAGES < TWO_BEGUN + TWO_ENDED
    assert decode.count("retractions") == 0
    for _ in range(5):
        HTTP.post(f"{decode.url}/flush_cache").raise_for_status()
        answers = HTTP.post(f"{decode.url}/generate", json=body(source.two, TWO_TOKENS), timeout=60).raise_for_status()
        assert [answer["output_ids"] for answer in answers.json()] == source.expected_of_two
        if decode.count("retractions"):
            break
    else:
        raise AssertionError("no request was retracted")
    decode.check_clean()


def check_metrics(found: dict[str, float]) -> None:
    """Metrics of an idle server after all prompts have run twice."""
    steps = 2 * len(LENGTHS) * (NEW_TOKENS - 1)
    assert found["pdserve_hot_write_backs_total"] == steps * LAYERS
    misses = found["pdserve_hot_misses_total"]
    assert misses > 0
    assert found["pdserve_hot_hits_total"] > 0
    assert misses <= found["pdserve_hot_swapped_in_bytes_total"] / ROW_BYTES <= misses * LAYERS
    assert 0 < found["pdserve_decode_steps_total"] <= steps
    assert found["pdserve_hot_buffers"] == found["pdserve_hot_buffers_resident"] == 0
    assert found["pdserve_hot_pages_available"] == found["pdserve_hot_pages"] > 0
    assert found["pdserve_hot_pages_borrowed"] == 0
    assert found["pdserve_kv_pages_available"] == found["pdserve_kv_pages"] == ALL_PAGES
    assert found["pdserve_kv_pages_held"] == 0
    assert found["pdserve_integrity_errors_total"] == 0


class Listener:
    """The control port of a fake prefill server: computes and writes nothing, and records messages of decode."""

    def __init__(self, port: int, me: Welcome, check: Callable[[Hello], str | None] = lambda _: None) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.control = PrefillControl("127.0.0.1", port, me, check=check, on_event=self._events.put)

    def __enter__(self) -> "Listener":
        self.control.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()

    def receive(self) -> MessageReceived:
        """The next message; other events are skipped."""
        while not isinstance(event := self._events.get(timeout=30), MessageReceived):
            pass
        return event


def read_hello(port: int) -> Hello:
    """The Hello of a decode server that connects to this port. The server is refused for now."""
    received: queue.SimpleQueue[Hello] = queue.SimpleQueue()

    def refuse(hello: Hello) -> str:
        received.put(hello)
        return "not yet"

    with Listener(port, Welcome(PROTOCOL_VERSION, InstanceId("none"), "", "", ()), refuse):
        return received.get(timeout=60)


def test_prefill_gets_the_destination_and_aborted_pages_stay_held_until_it_acknowledges(source: Source) -> None:
    """An aborted request ends at once; its pages stay held until prefill acknowledges the abort."""
    port, tokens = free_port(), 60
    flags = ("--prefill", f"127.0.0.1:{port}", *source.case.hisparse(TOPK, 12, kv_tokens=512))
    decode = source.servers.add("decode", source.model, *flags)
    hello = read_hello(port)
    assert hello.enable_hisparse
    pools = {pool.layout.planes[0].name: pool for pool in hello.ranks[0].pools}
    assert {name: pool.memory for name, pool in pools.items()} == {"latent": "host", "indexer": "device"}
    assert {pool.layout.num_pages for pool in pools.values()} == {512 // PAGE}

    me = Welcome(hello.protocol_version, InstanceId("p"), hello.model_fingerprint, hello.model_name, hello.ranks)
    with Listener(port, me) as prefill, ThreadPoolExecutor(1) as pool:
        decode.wait_ready(peers=1)
        answer = pool.submit(decode.post, source.prompts[-1][:tokens], 4)
        request = prefill.receive()
        assert isinstance(request.message, KvDestination)
        assert (request.message.enable_hisparse, request.message.granularity) == (True, "page")
        prompt, pages, *_ = (array.tolist() for array in request.arrays)
        assert prompt == source.prompts[-1][:tokens]
        assert len(set(pages)) == len(pages) == -(-tokens // PAGE)
        assert set(pages) <= set(range(512 // PAGE))
        HTTP.post(f"{decode.url}/abort_request", json={"abort_all": True}).raise_for_status()
        assert answer.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"
        abort = prefill.receive().message
        assert isinstance(abort, Abort)
        assert sum(decode.settled_info()["states"].values()) == 0
        assert metrics(decode)["pdserve_kv_pages_held"] == len(pages)
        prefill.control.send(request.instance, AbortAck(abort.key))
        wait_until(decode.idle, 10, "the pages are free")
        decode.check_clean()
    assert decode.stop() == 0


@pytest.mark.parametrize(("prefill_page", "chunk_size", "decode_page"), [(1, 48, 64), (64, 64, 1)])
def test_prefill_and_decode_page_sizes_may_differ(
    source: Source, prefill_page: int, chunk_size: int, decode_page: int
) -> None:
    """Chunks end within pages and last pages are partly filled; rows are swapped in from them."""
    flags = ("--page-size", str(prefill_page), "--chunk-size", str(chunk_size), "--kv-tokens", "1024")
    prefill = source.servers.add("prefill", source.model, *flags)
    hot_pages = 2 * (4 * TOPK // decode_page + 1)
    sizes = source.case.hisparse(4 * TOPK, hot_pages, kv_tokens=768, page_size=decode_page)
    decode = source.servers.add("decode", source.model, "--prefill", prefill.endpoint, *sizes, "--no-prefix-cache")
    prefill.wait_ready()
    decode.wait_ready(peers=1)
    assert generate_all(decode, source) == source.expected
    counters = decode.settled_info()["counters"]
    assert counters["chunks_verified"] > len(LENGTHS)
    check_misses(decode)
    for server in (decode, prefill):
        server.check_clean()
        assert server.stop() == 0


def test_requests_are_fully_resident_while_memory_is_free(source: Source) -> None:
    decode = source.decode(*source.case.hisparse(2 * TOPK, 400))
    assert decode.generate(source.prompts[-1], 1) == source.expected[-1][:1]  # ends when its KV arrives
    found: dict[str, float] = {}

    def in_use() -> bool:
        found.update(metrics(decode))
        return found["pdserve_hot_buffers"] > 0

    long_tokens = 100  # runs longer than the interval of reports
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(lambda: (generate_all(decode, source), generate_all(decode, source)))
        long = pool.submit(decode.generate, source.prompts[0], long_tokens)
        wait_until(in_use, 30, "hot buffers in use")
        assert list(answers.result(60)) == [source.expected] * 2
        assert long.result(60)[:NEW_TOKENS] == source.expected[0]
    assert found["pdserve_hot_buffers_resident"] == found["pdserve_hot_buffers"]
    assert found["pdserve_hot_pages_available"] < found["pdserve_hot_pages"]
    assert found["pdserve_kv_pages_held"] > 0
    decode.check_clean()
    written = (2 * len(LENGTHS) * (NEW_TOKENS - 1) + long_tokens - 1) * LAYERS
    # ranks report their counters to the leader from time to time
    wait_until(lambda: decode.info()["counters"]["hot_write_backs"] >= written, 10, f"{written} rows are written back")
    counters = decode.settled_info()["counters"]
    assert counters["hot_misses"] == counters["hot_hits"] == counters["hot_bytes_swapped_in"] == 0
    assert counters["hot_write_backs"] == written
    assert decode.stop() == 0


def test_free_key_pages_are_lent_to_hot_buffers_until_requests_need_them(source: Source) -> None:
    """The hot pool has one buffer per request. A single request is fully resident with lent pages. The following ones
    need all pages, and it continues as evicting.
    """
    long_tokens, buffers = 160, (len(LENGTHS) + 1) * (2 * TOPK // PAGE + 1)
    pages = ALL_PAGES + -(-(LENGTHS[0] + long_tokens - 1) // PAGE)
    flags = ("--no-prefix-cache", "--growth-tokens", str(long_tokens), "--max-running-requests", str(len(LENGTHS) + 1))
    decode = source.decode(*source.case.hisparse(2 * TOPK, buffers, kv_tokens=pages * PAGE), *flags)
    assert decode.generate(source.prompts[-1], NEW_TOKENS) == source.expected[-1]
    assert decode.count("hot_misses") == decode.count("hot_hits") == 0
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(decode.generate, source.prompts[0], long_tokens)
        wait_until(lambda: metrics(decode)["pdserve_hot_pages_borrowed"] > 0, 30, "pages are lent")
        assert generate_all(decode, source) == source.expected
        assert long.result(60)[:NEW_TOKENS] == source.expected[0]
    check_misses(decode)
    assert decode.settled_info()["counters"]["retractions"] == 0
    decode.check_clean()
    found = metrics(decode)
    assert found["pdserve_hot_pages_borrowed"] == 0
    assert found["pdserve_kv_pages_available"] == found["pdserve_kv_pages"] == pages
    assert decode.stop() == 0


@pytest.mark.parametrize(
    ("hot_rows", "layout"),
    [(TOPK, (1, 1)), (2 * TOPK, (2, 1)), (2 * TOPK, (1, 2))],
    ids=["k", "2k-tp2", "2k-pp2"],
)
def test_tokens_equal_transformers_when_decode_computes_prompts_itself(
    source: Source, hot_rows: int, layout: tuple[int, int]
) -> None:
    """Prompts are computed in hot buffers with all their rows, beside running requests. The hot pool has little more
    than the longest one needs: requests become evicting as other prompts start.
    """
    (tp, pp), hot_pages = layout, LENGTHS[-1] // PAGE + 6
    sizes = source.case.hisparse(hot_rows, hot_pages, kv_tokens=ALL_PAGES * PAGE, pp=pp)
    flags = (*sizes, "--tp", str(tp), "--max-step-tokens", "48", "--growth-tokens", str(GROWTH_TOKENS))
    server = source.servers.add("serve", source.model, *flags).wait_ready()
    assert generate_all(server, source) == source.expected
    assert generate_all(server, source) == source.expected  # from the prefix cache, with shared rows
    check_conversation(server, source)
    sampling = {"temperature": 1.0, "sampling_seed": 5, "n": 2, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    payload = {"input_ids": source.prompts[-2], "sampling_params": sampling}
    twice = [HTTP.post(f"{server.url}/generate", json=payload, timeout=60).raise_for_status().json() for _ in range(2)]
    first, second = ([sample["output_ids"] for sample in reply] for reply in twice)
    assert first == second
    meta = twice[1][0]["meta_info"]
    assert meta["cached_tokens_details"] == {"device": 0, "host": meta["cached_tokens"], "storage": 0}
    assert meta["cached_tokens"] > 0
    assert first[0] != first[1]
    most = hot_pages * PAGE - 1
    too_long = server.post([0] * (most + 1), NEW_TOKENS)
    assert too_long.status_code == 413
    assert f"exceeds this server's hot pool, in which it computes prompts of up to {most} tokens" in too_long.text
    counters = server.settled_info()["counters"]
    assert counters["local_prefill_always"] == 2 * len(LENGTHS) + 4
    assert counters["transfers"] == 0
    check_misses(server)
    assert counters["prefix_tokens_reused"] > 0
    server.check_clean()
    assert server.stop() == 0


def test_decode_computes_prompts_when_the_only_prefill_server_is_killed(source: Source) -> None:
    prefill = source.servers.add("prefill", source.model, *PREFILL).wait_ready()
    sizes = source.case.hisparse(2 * TOPK, LENGTHS[-1] // PAGE + 8)
    flags = ("--prefill", prefill.endpoint, "--local-prefill", "auto", "--quarantine-s", "1")
    decode = source.servers.add("decode", source.model, *sizes, *flags).wait_ready(peers=1)
    assert generate_all(decode, source) == source.expected
    assert decode.count("transfers") > 0
    HTTP.post(f"{decode.url}/flush_cache").raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, decode, source)
        wait_until(lambda: not decode.idle(), 20, "requests")
        prefill.kill()
        assert answers.result(60) == source.expected
    assert generate_all(decode, source) == source.expected
    counters = decode.settled_info()["counters"]
    assert counters["local_prefill_absent"] >= len(LENGTHS)
    assert counters["requests_failed"] == 0
    decode.check_clean()
    assert decode.stop() == 0


def check_two_requests_that_do_not_fit(decode: Server, source: Source) -> None:
    """Prompts of 60 and 200 tokens with 90 more each begin together in 400 tokens of KV, and cannot end there."""
    two = source.prompts[3:5]
    answers = HTTP.post(f"{decode.url}/generate", json=body(two, 90), timeout=60).raise_for_status().json()
    expected = [GreedyTokens(source.reference, prompt, 90) for prompt in two]
    assert [answer["output_ids"] for answer in answers] == expected


@pytest.mark.parametrize("layout", [(1, 1), *([(2, 1), (1, 2), (2, 2)] if FULL else [])], ids="{0[0]}x{0[1]}".format)
def test_requests_queue_retract_and_are_refused_without_failing_when_memory_is_scarce(
    source: Source, layout: tuple[int, int]
) -> None:
    """Two hot buffers, two request slots and pages for about two of the long prompts. There are six requests, four that
    time out and some that are too long, and a prefill server is killed.
    """
    spare = source.servers.add("prefill", source.model, *PREFILL)
    tp, pp = layout
    decode = source.decode(
        *source.case.hisparse(2 * TOPK, 2 * (2 * TOPK // PAGE + 1), kv_tokens=400, pp=pp),
        *("--tp", str(tp)),
        *("--growth-tokens", str(GROWTH_TOKENS), "--no-prefix-cache"),
        *("--max-running-requests", "2", "--quarantine-s", "1"),
        spare=spare,
    )
    urgent = [{"priority": number % 3} for number in range(len(source.prompts))]
    tokens = 2 * GROWTH_TOKENS
    with ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(decode.generate, prompt, tokens, **extra)
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
        expected = [GreedyTokens(source.reference, prompt, tokens) for prompt in source.prompts]
        assert [answer.result(60) for answer in answers] == expected
    wait_until(decode.idle, 15, "idle")
    if not decode.count("retractions"):  # on a fast machine, no long request ran beside another
        check_two_requests_that_do_not_fit(decode, source)
    counters = decode.settled_info()["counters"]
    assert counters["retractions"] > 0
    assert counters["requests_aborted"] > 0
    assert counters["requests_failed"] == 0
    assert counters["peers_lost"] == 1
    decode.check_clean()
    assert decode.stop() == 0


def test_hisparse_refuses_dense_models_and_impossible_hot_rows(source: Source, tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    refused = [
        (dense, [], "enable_hisparse needs a model with sparse attention"),
        (source.model, ["--hot-rows", "8"], "hot_rows = 8 is below the model's index_topk = 16"),
    ]
    if FULL:  # tests/memory covers them too
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
