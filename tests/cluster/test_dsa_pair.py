"""Models with latent attention on real pairs: all families, different layouts, chunked prompts, retraction."""

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import (
    DsaArchitecture,
    GreedyTokens,
    LatentArchitecture,
    is_reference_greedy,
    load_reference,
    make_dsa_checkpoint,
)
from tests.cluster.servers import HTTP, Cluster, Server, cluster, wait_until

TOPK = 16
LENGTHS = (1, 9, TOPK, TOPK + 1, 49, 150)
"""Below, at and far above index_topk; the last two take several chunks."""
NEW_TOKENS = 8
PREFILL_PAGE = 16
LAYERS = 2
"""Of most models here: a dense layer and one with experts, also as two stages."""

FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: retraction of every family."""

Layout = tuple[int, int]
"""Tensor-parallel ranks and pipeline stages."""


class Pairs(NamedTuple):
    """The prefill servers of a model, prompts, and the tokens of transformers."""

    servers: Cluster
    model: Path
    sources: dict[Layout, Server]
    prompts: list[list[int]]
    expected: list[GreedyTokens]
    reference: Any

    def decode(self, layout: Layout, *flags: str) -> Server:
        """Start a decode server that is paired with all prefill servers."""
        endpoints = ",".join(server.endpoint for server in self.sources.values())
        server = self.servers.add(
            "decode", self.model, "--prefill", endpoints, *layout_flags(layout), "--no-prefix-cache", *flags
        )
        return server.wait_ready(peers=len(self.sources))


def layout_flags(layout: Layout) -> list[str]:
    tp, pp = layout
    return ["--tp", str(tp), "--pp", str(pp)]


@contextlib.contextmanager
def serving(
    factory: pytest.TempPathFactory, architecture: LatentArchitecture, layouts: Sequence[Layout], **overrides: Any
) -> Iterator[Pairs]:
    """Start prefill servers of these layouts; afterwards check that they are clean."""
    model = make_dsa_checkpoint(factory.mktemp("model"), architecture, **overrides)
    flags = ("--page-size", str(PREFILL_PAGE), "--chunk-size", str(3 * PREFILL_PAGE), "--kv-tokens", "4096")
    with cluster(factory.mktemp("logs")) as servers:
        sources = {layout: servers.add("prefill", model, *layout_flags(layout), *flags) for layout in layouts}
        draw = random.Random(7)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
        for server in sources.values():
            server.wait_ready()
        yield Pairs(servers, model, sources, prompts, expected, reference)
        for server in sources.values():
            server.check_clean()


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with serving(tmp_path_factory, "deepseek_v3", [(2, 1), (1, 1)], num_hidden_layers=LAYERS) as pairs:
        yield pairs


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with serving(tmp_path_factory, "deepseek_v32", [(2, 1), (1, 1)], num_hidden_layers=LAYERS) as pairs:
        yield pairs


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Layers that share a selection must be on one stage, which rules out equal stages. Of two stages the first has one
    indexer for three layers, the second two for two layers.
    """
    pattern = "FSSFF"
    shape = {"num_hidden_layers": len(pattern), "index_topk_pattern": pattern}
    with serving(tmp_path_factory, "glm_moe_dsa", [(1, 2), (1, 1)], **shape) as pairs:
        yield pairs


def test_tokens_of_deepseek_v3_equal_transformers(deepseek_v3: Pairs) -> None:
    """From prefill servers of one and of two ranks to two stages with another page size. The model has no indexer."""
    check_tokens(deepseek_v3, (1, 2), 5)


@pytest.mark.parametrize(("layout", "page_size"), [((1, 1), 64), ((1, 2), 16)], ids=["one rank", "two stages"])
def test_tokens_of_deepseek_equal_transformers(deepseek: Pairs, layout: Layout, page_size: int) -> None:
    check_tokens(deepseek, layout, page_size)


@pytest.mark.parametrize(("layout", "page_size"), [((2, 1), 5), ((1, 3), 16)], ids=["two ranks", "three stages"])
def test_tokens_of_glm_equal_transformers(glm: Pairs, layout: Layout, page_size: int) -> None:
    check_tokens(glm, layout, page_size)


def test_stages_with_different_numbers_of_indexers_lend_pages(glm: Pairs) -> None:
    """HiSparse in two stages: a hot page covers six key pages on the first and two on the second. The hot pool has
    buffers for two requests; a single request is fully resident with lent pages.
    """
    page_size, hot_rows, pages = 8, 2 * TOPK, 200
    hot_pages = 2 * (hot_rows // page_size + 1)
    second_stage_bytes = (pages // 2 + hot_pages) * page_size * 2 * 64 * 4
    decode = glm.decode(
        (1, 2),
        *("--page-size", str(page_size), "--kv-tokens", str(pages * page_size), "--max-running-requests", "2"),
        *("--enable-hisparse", "--hot-rows", str(hot_rows), "--host-memory-gib", "0.1"),
        *("--kv-memory-gib", str((second_stage_bytes + 100) / (1 << 30))),
    )
    line = "HiSparse: 10 hot pages of 8 rows, and up to 33 more, lent by the index pool in units of 1; "
    assert line in decode.log.read_text()
    assert decode.generate(glm.prompts[-1], NEW_TOKENS) == glm.expected[-1]
    assert decode.count("hot_misses") == decode.count("hot_hits") == 0
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), glm.prompts)) == glm.expected
    assert decode.count("chunks_verified") > 0
    decode.check_clean()
    assert decode.stop() == 0


def check_tokens(pairs: Pairs, layout: Layout, page_size: int) -> None:
    """Tokens from every prefill server to a decode server of `layout`. Two samples of one prompt, which share all pages
    but the last, equal two separate requests.
    """
    decode = pairs.decode(layout, "--page-size", str(page_size), "--kv-tokens", "4096")
    for source in pairs.sources.values():
        with ThreadPoolExecutor() as pool:
            found = pool.map(
                lambda prompt, source=source: decode.generate(prompt, NEW_TOKENS, **source.bootstrap), pairs.prompts
            )
        assert list(found) == pairs.expected
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}

    def sample(**more: int) -> Any:
        request = {"input_ids": pairs.prompts[-2], "sampling_params": {**sampling, **more}}
        return HTTP.post(f"{decode.url}/generate", json=request, timeout=60).raise_for_status().json()

    alone = [sample(seed=seed)["output_ids"] for seed in (3, 4)]
    assert alone[0] != alone[1], "two seeds gave the same sample"
    assert [answer["output_ids"] for answer in sample(seed=3, n=2)] == alone
    assert decode.count("chunks_verified") > 0
    assert len(decode.info()["ranks"]) == layout[0] * layout[1]
    decode.check_clean()
    assert decode.stop() == 0


@pytest.mark.parametrize("family", ["glm", "deepseek_v3"] if FULL else ["glm"])
def test_retraction_under_memory_pressure_keeps_tokens(family: str, request: pytest.FixtureRequest) -> None:
    """Six requests in a pool for two and a half: latent rows and indexer keys are copied to host memory and back."""
    pairs: Pairs = request.getfixturevalue(family)
    decode = pairs.decode((1, 1), "--page-size", "8", "--kv-tokens", "480", "--growth-tokens", "8")
    prompt = pairs.prompts[-1]
    with ThreadPoolExecutor(6) as pool:
        first, *others = pool.map(lambda _: decode.generate(prompt, 20), range(6))
    assert len(first) == 20
    assert is_reference_greedy(pairs.reference, prompt, first)
    assert others == [first] * 5
    assert decode.count("retractions") > 0
    decode.check_clean()
    assert decode.stop() == 0


def test_fp8_rows_are_transferred_from_expert_parallel_ranks(tmp_path: Path, servers: Cluster) -> None:
    """Prefill has two ranks with half of the experts each. Tokens equal those of one process with fp8 rows."""
    model = make_dsa_checkpoint(tmp_path / "model", index_topk=TOPK, num_hidden_layers=LAYERS)
    flags = ("--kv-dtype", "fp8_e4m3", "--kv-tokens", "4096")
    prefill, decode = servers.pair(
        model, (*flags, *layout_flags((2, 1)), "--expert-parallel", "--chunk-size", "48"), (*flags, "--page-size", "64")
    )
    runner = ModelRunner.load(
        locate_model(str(model)), device=torch.device("cpu"), dtype=torch.float32, kv_dtype="fp8_e4m3"
    )
    for length in LENGTHS:
        prompt = random.Random(length).choices(range(256), k=length)
        assert decode.generate(prompt, NEW_TOKENS) == greedy(runner, prompt, NEW_TOKENS)
    assert decode.count("chunks_verified") > 0
    assert HTTP.get(f"{decode.url}/get_model_info", timeout=5).json()["dtype"] == "uint8"
    for server in (prefill, decode):
        server.check_clean()


@pytest.mark.parametrize("architecture", ["deepseek_v32", "glm_moe_dsa"])
def test_fp8_keys_are_transferred_between_page_sizes(
    tmp_path: Path, servers: Cluster, architecture: DsaArchitecture
) -> None:
    """With and without HiSparse, and again from the prefix cache; tokens equal those of one process with fp8 keys. A
    server with float32 keys does not pair.
    """
    model = make_dsa_checkpoint(tmp_path / "model", architecture, index_topk=TOPK, num_hidden_layers=LAYERS)
    fp8 = ("--index-dtype", "fp8_e4m3")
    prefill = servers.add("prefill", model, *fp8, "--page-size", "16", "--chunk-size", "48", "--kv-tokens", "4096")
    to_prefill = ("--prefill", prefill.endpoint)
    plain = servers.add("decode", model, *to_prefill, *fp8, "--page-size", "5", "--kv-tokens", "2048")
    hot = servers.add(
        *("decode", model, *to_prefill, *fp8, "--page-size", "8", "--kv-tokens", "1024"),
        *("--enable-hisparse", "--hot-rows", str(TOPK), "--host-memory-gib", "0.1", "--max-running-requests", "4"),
        # keys of 32 bytes and a scale, and 16 hot pages, in all layers
        *("--kv-memory-gib", str(LAYERS * (1024 * 36 + 16 * 8 * 256) / (1 << 30))),
    )
    other = servers.add("decode", model, *to_prefill, "--page-size", "16", "--kv-tokens", "512")
    runner = ModelRunner.load(
        locate_model(str(model)), device=torch.device("cpu"), dtype=torch.float32, index_dtype="fp8_e4m3"
    )
    # the last one has more rows than all hot pages and all that can be lent to them
    prompts = [random.Random(length).choices(range(256), k=length) for length in (*LENGTHS, 400)]
    expected = [greedy(runner, prompt, NEW_TOKENS) for prompt in prompts]
    for decode in (plain, hot):
        decode.wait_ready(peers=1)
        for _ in range(2):
            with ThreadPoolExecutor() as pool:
                found = list(pool.map(lambda prompt, to=decode: to.generate(prompt, NEW_TOKENS), prompts))
            assert found == expected
        assert decode.count("prefix_tokens_reused") > 0
        assert decode.count("chunks_verified") > 0
        assert "indexer keys: float8_e4m3fn, 36 bytes per token and layer" in decode.log.read_text()
    assert hot.count("hot_misses") > 0
    wait_until(lambda: other.info()["peers"][0]["state"] == "refused", 30, "refused")
    detail = other.info()["peers"][0]["detail"]
    assert "prefill has latent of 256 B (float32), indexer of 32 B + indexer_scale of 4 B (float8_e4m3fn)" in detail
    assert "decode has latent of 256 B (float32), indexer of 128 B (float32)" in detail
    for server in (prefill, plain, hot):
        server.check_clean()


def greedy(runner: ModelRunner, prompt: list[int], new_tokens: int) -> list[int]:
    cache, pages = runner.make_cache(32, 16), list(range(32))
    out: list[int] = []
    piece, start = prompt, 0
    while len(out) < new_tokens:
        logits = runner.forward(cache, [SequenceSlice(piece, start, pages)])
        assert logits is not None
        start += len(piece)
        piece = [int(logits[0].argmax())]
        out += piece
    return out
