"""Data-parallel attention on one GPU, which the ranks share: they exchange tokens through host memory."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import TinyArchitecture, load_reference, make_dsa_checkpoint, reference_greedy
from tests.cluster.servers import Cluster, Server, cluster
from tests.cluster.test_dp_pair import DP2, HISPARSE, HISPARSE_TOKENS, LAYERS, PAGE
from tests.cluster.test_mixture_dp_pair import Case, make_model, start

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
LENGTHS = (1, 9, 17, 49, 90, 150)
FLAGS = ("--device", "cuda:0", "--dtype", "float32")
PREFILL = ("--page-size", "16", "--chunk-size", "48", "--kv-tokens", "2048")


class Source(NamedTuple):
    servers: Cluster
    model: Path
    prefill: Server
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=[(), DP2], ids=["plain prefill", "data-parallel prefill"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("model")
    model = make_dsa_checkpoint(folder, "deepseek_v32", index_topk=16, num_hidden_layers=LAYERS)
    with cluster(tmp_path_factory.mktemp("logs")) as servers:
        prefill = servers.add("prefill", model, *FLAGS, *request.param, *PREFILL)
        draw = random.Random(3)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        reference = load_reference(model)
        expected = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        prefill.wait_ready()
        yield Source(servers, model, prefill, prompts, expected)
        prefill.check_clean()


@pytest.mark.parametrize("hisparse", [False, True], ids=["plain", "hisparse"])
def test_tokens_equal_transformers(source: Source, hisparse: bool) -> None:
    flags = ("--kv-tokens", str(HISPARSE_TOKENS), *HISPARSE) if hisparse else ("--kv-tokens", "2048")
    to_prefill = ("--prefill", source.prefill.endpoint, "--page-size", str(PAGE))
    decode = source.servers.add("decode", source.model, *to_prefill, *FLAGS, *DP2, *flags).wait_ready(peers=1)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), source.prompts))
    assert found == source.expected
    assert decode.count("chunks_verified") > 0
    assert (decode.count("hot_misses") > 0) == hisparse
    decode.check_clean()
    assert decode.stop() == 0


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [("qwen3_moe", "tp2", "dp2"), ("gpt_oss", "tp2", "dp2"), ("gpt_oss", "dp2", "tp2"), ("mixtral", "dp2", "dp2")],
)
def test_mixture_with_kv_heads(
    servers: Cluster, tmp_path: Path, family: TinyArchitecture, prefill: str, decode: str
) -> None:
    """Tokens are those of transformers, staged where the sides hold different heads."""
    model = make_model(tmp_path / "model", family)
    source, target = start(servers, model, Case(family, prefill, decode), "--kv-tokens", "2048", common=FLAGS)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: target.generate(prompt, len(model.expected[0])), model.prompts))
    assert found == model.expected
    assert target.count("chunks_verified") > 0
    assert (source.count("staged_parts") > 0) == (prefill != decode)
    for server in (source, target):
        server.check_clean()
    assert target.stop() == 0
