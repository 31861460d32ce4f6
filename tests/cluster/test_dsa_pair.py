"""Sparse-attention models through real pairs: both families, any layout to any layout, chunked and retracted."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.checkpoints import DsaArchitecture, load_reference, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import Cluster, Server, cluster

TOPK = 16
LENGTHS = (1, 9, TOPK, TOPK + 1, 49, 150)
"""Below, at and far above the selection; the last two are several chunks."""
NEW_TOKENS = 12
PREFILL_PAGE = 16

Layout = tuple[int, int]
"""Tensor-parallel ranks and pipeline stages."""


class Case(NamedTuple):
    """A model and the layouts of its prefill servers."""

    architecture: DsaArchitecture
    overrides: dict[str, Any]
    prefill: tuple[Layout, ...]


# GLM's layers share selections where an even cut into two stages would part them.
CASES = {
    "deepseek": Case("deepseek_v32", {}, prefill=((2, 1), (1, 1))),
    "glm": Case("glm_moe_dsa", {"index_topk_pattern": "FSSF"}, prefill=((1, 2), (1, 1))),
}


class Pairs(NamedTuple):
    """The prefill servers of a case and what transformers says."""

    servers: Cluster
    model: Path
    sources: dict[Layout, Server]
    prompts: list[list[int]]
    expected: list[list[int]]
    reference: Any

    def decode(self, layout: Layout, *flags: str) -> Server:
        """A decode server that is paired with all prefill servers."""
        endpoints = ",".join(server.endpoint for server in self.sources.values())
        server = self.servers.add(
            "decode", self.model, "--prefill", endpoints, *layout_flags(layout), "--no-prefix-cache", *flags
        )
        return server.wait_ready(peers=len(self.sources))


def layout_flags(layout: Layout) -> list[str]:
    tp, pp = layout
    return ["--tp", str(tp), "--pp", str(pp)]


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Of the case that is the parameter."""
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(f"{request.param}-model")
    model = make_dsa_checkpoint(directory, case.architecture, index_topk=TOPK, **case.overrides)
    flags = ("--page-size", str(PREFILL_PAGE), "--chunk-size", str(3 * PREFILL_PAGE), "--kv-tokens", "4096")
    with cluster(tmp_path_factory.mktemp(f"{request.param}-logs")) as servers:
        sources = {layout: servers.add("prefill", model, *layout_flags(layout), *flags) for layout in case.prefill}
        draw = random.Random(7)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        for server in sources.values():
            server.wait_ready()
        yield Pairs(servers, model, sources, prompts, expected, reference)
        for server in sources.values():
            server.check_clean()


@pytest.mark.parametrize(
    ("pairs", "layout", "page_size"),
    [("deepseek", (1, 1), 64), ("deepseek", (1, 2), 16), ("glm", (2, 1), 5)],
    indirect=["pairs"],
)
def test_tokens_equal_transformers_whatever_the_layouts(pairs: Pairs, layout: Layout, page_size: int) -> None:
    """Two samples of one prompt, which share its full pages and have a last page each, equal the same two alone."""
    decode = pairs.decode(layout, "--page-size", str(page_size), "--kv-tokens", "4096")
    for source in pairs.sources.values():
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": source.bootstrap_port}
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda prompt, place=place: decode.generate(prompt, NEW_TOKENS, **place), pairs.prompts)
        assert list(found) == pairs.expected
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}

    def sample(**more: int) -> Any:
        request = {"input_ids": pairs.prompts[-2], "sampling_params": {**sampling, **more}}
        return httpx.post(f"{decode.url}/generate", json=request, timeout=60).raise_for_status().json()

    alone = [sample(seed=seed)["output_ids"] for seed in (3, 4)]
    assert alone[0] != alone[1], "the seeds make a difference"
    assert [answer["output_ids"] for answer in sample(seed=3, n=2)] == alone
    assert decode.count("chunks_verified") > 0
    assert len(decode.info()["ranks"]) == layout[0] * layout[1]
    decode.check_clean()
    assert decode.stop() == 0


@pytest.mark.parametrize("pairs", ["glm"], indirect=True)
def test_a_pool_too_small_for_all_retracts_and_gives_the_same_tokens(pairs: Pairs) -> None:
    """Six at once in a pool for about two and a half: latent rows and indexer keys go to host memory and come back."""
    decode = pairs.decode((1, 1), "--page-size", "8", "--kv-tokens", "480", "--growth-tokens", "8")
    prompt = pairs.prompts[-1]
    expected = reference_greedy(pairs.reference, prompt, 40)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: decode.generate(prompt, 40), range(6))) == [expected] * 6
    assert decode.count("retractions") > 0
    decode.check_clean()
    assert decode.stop() == 0
