"""Decode servers on a GPU that compute prompts themselves, and servers that change their role."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.checkpoints import load_reference, make_checkpoint, make_dsa_checkpoint, reference_greedy
from tests.cluster.greedy import generate_all
from tests.cluster.servers import Cluster, Server, cluster
from tests.cluster.test_changing_roles import become

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
LENGTHS = (1, 16, 17, 60, 200, 450)
PAGE = 8
DENSE = ("--kv-tokens", "8192")
HISPARSE = ("--enable-hisparse", "--hot-rows", "32", "--kv-tokens", "2048", "--host-memory-gib", "0.5")
HOT_PAGES = LENGTHS[-1] // PAGE + 12
"""Little more than the longest prompt needs: requests become evicting when other prompts start."""
ROW_BYTES, KEY_BYTES = 64 * 4 * 4, 2 * 32 * 4
"""Bytes per token of the sparse model: four layers of 64 floats, two indexers of 32."""
SERVERS: dict[str, tuple[Literal["dense", "sparse"], tuple[str, ...]]] = {
    "graphs": ("dense", DENSE),
    "eager": ("dense", (*DENSE, "--no-cuda-graphs")),
    "tp2": ("dense", (*DENSE, "--tp", "2")),
    "pp2": ("dense", (*DENSE, "--pp", "2")),
    "sparse": ("sparse", ("--kv-tokens", "8192")),
    "hisparse": (
        "sparse",
        (*HISPARSE, "--kv-memory-gib", str((2048 * KEY_BYTES + HOT_PAGES * PAGE * ROW_BYTES) / (1 << 30))),
    ),
}


class Started(NamedTuple):
    servers: dict[str, Server]
    prompts: list[list[int]]
    expected: dict[str, list[list[int]]]
    models: dict[str, Path]
    cluster: Cluster


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    models = {
        "dense": make_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3"),
        "sparse": make_dsa_checkpoint(
            tmp_path_factory.mktemp("sparse"),
            "glm_moe_dsa",
            index_topk=16,
            index_topk_pattern="FSSF",
            max_position_embeddings=2048,
            first_k_dense_replace=4,
        ),
    }
    with cluster(tmp_path_factory.mktemp("logs")) as running:
        shared = ("--device", "cuda:0", "--dtype", "float32", "--page-size", str(PAGE), "--max-step-tokens", "64")
        servers = {name: running.add("serve", models[kind], *shared, *own) for name, (kind, own) in SERVERS.items()}
        draw = random.Random(19)
        prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
        expected = {}
        for kind, model in models.items():
            reference = load_reference(model).cuda()
            expected[kind] = [reference_greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
        yield Started(servers, prompts, expected, models, running)


@pytest.mark.parametrize("name", SERVERS)
def test_tokens_equal_transformers(started: Started, name: str) -> None:
    """All at once, again from the prefix cache, then one by one."""
    server = started.servers[name].wait_ready()
    for together in (True, True, False):
        outputs = generate_all(server, started.prompts, NEW_TOKENS, together=together)
        assert outputs == started.expected[SERVERS[name][0]]
    counters = server.settled_info()["counters"]
    assert counters["local_prefill_always"] == 3 * len(LENGTHS)
    assert counters["prefix_tokens_reused"] > 0
    assert (counters["hot_misses"] > 0) == (name == "hisparse")
    server.check_clean()


def test_prefill_server_becomes_decode_and_prefill_again(started: Started) -> None:
    flags = ("--device", "cuda:0", "--dtype", "float32", "--kv-tokens", "8192", "--served-model-name", "m")
    model = started.models["dense"]
    switching = started.cluster.add("prefill", model, "--allow-role-switch", *flags, leaders=3)
    staying = started.cluster.add("prefill", model, *flags)
    decode = started.cluster.add("decode", model, "--prefill", f"{switching.endpoint},{staying.endpoint}", *flags)
    decode.wait_ready(peers=2)
    become(switching, "decode", settings={"prefill": [staying.endpoint], "local_prefill": "never"})
    switching.wait_ready(peers=1)
    assert generate_all(switching, started.prompts, NEW_TOKENS, together=True) == started.expected["dense"]
    assert switching.count("transfers") == len(LENGTHS)
    become(switching, "prefill")
    decode.wait_ready(peers=2)
    outputs = [decode.generate(prompt, NEW_TOKENS, **switching.bootstrap) for prompt in started.prompts]
    assert outputs == started.expected["dense"]
    assert switching.count("requests_finished") == len(LENGTHS)
