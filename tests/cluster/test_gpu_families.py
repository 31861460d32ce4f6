"""Every model family and weight format through real pairs on one GPU: tokens are those of transformers.

Each test starts the servers of one model: equal servers of one rank, and one with another number of ranks, which share
the GPU. Every decode server takes prompts from every prefill server. Quantised models are compared with transformers on
the dequantised weights.

    PDSERVE_FAMILIES_DEVICE=cpu pytest tests/cluster/test_gpu_families.py       the same tests without a GPU
"""

import itertools
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.cluster.servers import Cluster, Server, cluster
from tests.family_checkpoints import FAMILIES, Dtype, limit_for, token_gaps, write_checkpoint

DEVICE = os.environ.get("PDSERVE_FAMILIES_DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []

NEW_TOKENS = 12
LENGTHS = (1, 17, 49, 130, 300)
SHARED_TOKENS, MORE_TOKENS = 200, 30
"""Shared and own tokens of the prompt that begins like the longest one."""
CHUNKS = {"float32": 48, "bfloat16": 160}
"""Tokens of a prompt in one step. Up to 64, products with fp8 weights have exact activations, which float32 needs; from
129 on, every format uses its kernels for many tokens.
"""
IPC = "tensor-parallel ranks communicate over CUDA IPC memory"

ONE = ("--page-size", "16")


class Layout(NamedTuple):
    """Flags of the prefill and of the decode servers."""

    prefills: tuple[tuple[str, ...], ...]
    decodes: tuple[tuple[str, ...], ...]


LAYOUTS = {
    "from-tp2": Layout((ONE, ("--tp", "2", "--page-size", "16")), (("--page-size", "64"),)),
    "from-pp2": Layout((ONE, ("--pp", "2", "--page-size", "8")), (ONE,)),
    "to-tp2": Layout((ONE,), (ONE, ("--tp", "2", "--page-size", "8"))),
    "to-pp2": Layout((ONE,), (ONE, ("--pp", "2", "--page-size", "32"))),
    "to-ep2": Layout((ONE,), (ONE, ("--tp", "2", "--expert-parallel", "--page-size", "32"))),
}


class Case(NamedTuple):
    family: str
    format: str | None
    layouts: dict[Dtype, str]


def case(family: str, format_name: str | None, float32: str, bfloat16: str) -> Case:
    return Case(family, format_name, {"float32": float32, "bfloat16": bfloat16})


CASES = {
    f"{each.family}-{each.format or 'plain'}": each
    for each in (
        case("llama", None, "from-tp2", "to-pp2"),
        case("qwen2", None, "to-tp2", "from-pp2"),
        case("qwen3", None, "to-pp2", "from-tp2"),
        case("qwen3-moe", None, "to-ep2", "from-tp2"),
        case("mistral", None, "from-pp2", "to-tp2"),
        case("mixtral", None, "from-tp2", "to-ep2"),
        case("gemma3", None, "to-pp2", "from-tp2"),
        case("olmo2", None, "from-tp2", "to-pp2"),
        case("gpt-oss", None, "from-tp2", "to-ep2"),
        case("deepseek-v3", None, "from-tp2", "to-pp2"),
        case("kimi-k2", None, "to-pp2", "to-ep2"),
        case("deepseek-v32", None, "to-tp2", "from-pp2"),
        case("glm-dsa", None, "from-pp2", "from-tp2"),
        case("qwen3", "fp8-blocks", "to-pp2", "from-tp2"),
        case("qwen3-moe", "fp8-blocks", "to-tp2", "to-ep2"),
        case("deepseek-v3", "fp8-blocks", "from-tp2", "to-pp2"),
        case("qwen3", "fp8-rows", "from-tp2", "to-pp2"),
        case("qwen2", "fp8-matrices", "to-tp2", "from-pp2"),
        case("mixtral", "fp8-matrices", "to-ep2", "from-tp2"),
        case("llama", "fp8-fbgemm", "from-pp2", "to-tp2"),
        case("qwen2", "awq", "from-tp2", "to-pp2"),
        case("llama", "gptq", "to-pp2", "from-tp2"),
        case("qwen3", "w4a16", "to-tp2", "from-pp2"),
        case("qwen3-moe", "w4a16-asymmetric", "from-tp2", "to-ep2"),
        case("kimi-k2", "int4-experts", "to-ep2", "from-tp2"),
        case("gpt-oss", "mxfp4", "to-tp2", "from-pp2"),
        case("llama", "nvfp4", "from-tp2", "to-pp2"),
        case("qwen3-moe", "nvfp4-packed", "to-ep2", "from-tp2"),
    )
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_transformers(name: str, dtype: Dtype, tmp_path: Path) -> None:
    family, format_name, layouts = CASES[name]
    checkpoint = write_checkpoint(tmp_path, family, format_name, dtype)
    with cluster(tmp_path) as servers:
        prefills, decodes = start(servers, checkpoint.directory, LAYOUTS[layouts[dtype]], dtype)
        reference = checkpoint.load_reference()
        for server, peers in [*((each, decodes) for each in prefills), *((each, prefills) for each in decodes)]:
            server.wait_ready(peers=len(peers))
        limit = limit_for(format_name, dtype)
        for seed, (prefill, decode) in enumerate(itertools.product(prefills, decodes)):
            prompts = draw_prompts(seed)
            for prompt, output in zip(prompts, generate(prefill, decode, prompts), strict=True):
                gaps = token_gaps(reference, prompt, output)
                assert len(gaps) == NEW_TOKENS
                assert max(gaps) <= limit, (prefill.flags, decode.flags, len(prompt), output, gaps)
        for decode in decodes:
            counters = decode.settled_info()["counters"]
            assert counters["chunks_verified"] > 0
            assert counters["prefix_tokens_reused"] > 0 or family == "mistral", "no prefix was reused"
        for server in (*prefills, *decodes):
            server.check_clean()
        if ON_GPU:
            check_logs(servers.servers, expands=expands(family, format_name), dtype=dtype)


def start(servers: Cluster, model: Path, layout: Layout, dtype: Dtype) -> tuple[list[Server], list[Server]]:
    """Start all servers; does not wait for them."""
    common = ("--device", DEVICE, "--dtype", dtype, "--kv-tokens", "4096")
    chunks = ("--chunk-size", str(CHUNKS[dtype]))
    prefills = [servers.add("prefill", model, *common, *chunks, *flags) for flags in layout.prefills]
    endpoints = ",".join(prefill.endpoint for prefill in prefills)
    batches = ("--prefill", endpoints, "--max-running-requests", "8")
    return prefills, [servers.add("decode", model, *common, *batches, *flags) for flags in layout.decodes]


def draw_prompts(seed: int) -> list[list[int]]:
    """A random prompt of each length in LENGTHS, and one that shares the prefix of the longest."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    return [*prompts, prompts[-1][:SHARED_TOKENS] + draw.choices(range(VOCAB_SIZE), k=MORE_TOKENS)]


def generate(prefill: Server, decode: Server, prompts: Sequence[list[int]]) -> list[list[int]]:
    """All but the last at once; then the last one, whose prefix is cached by now."""

    def output(prompt: list[int]) -> list[int]:
        return decode.generate(prompt, NEW_TOKENS, **prefill.bootstrap)

    with ThreadPoolExecutor() as pool:
        return [*pool.map(output, prompts[:-1]), output(prompts[-1])]


def expands(family: str, format_name: str | None) -> bool:
    """Whether ranks expand some quantised weights: those of kv_b_proj."""
    return FAMILIES[family].latent and format_name == "fp8-blocks"


def check_logs(servers: Sequence[Server], *, expands: bool, dtype: Dtype) -> None:
    """The servers used the intended code: weights as they are stored, CUDA graphs, and collectives over CUDA IPC."""
    for server in servers:
        log = server.log.read_text()
        assert ("--tp" in server.flags) == (IPC in log)
        assert ("tensors are dequantized" in log) == expands
        if dtype == "bfloat16":
            assert "CUDA graphs captured" in log
