"""Servers of several ranks that share one GPU, with and without CUDA graphs."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint, make_dsa_checkpoint
from tests.cluster.greedy import generate_all, same_tokens
from tests.cluster.servers import cluster

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
LENGTHS = (1, 16, 17, 49, 200)
SMALL = ("--kv-tokens", "4096", "--max-running-requests", "8", "--max-step-tokens", "64", "--page-size", "16")


class Case(NamedTuple):
    sparse: bool
    flags: tuple[str, ...]
    communicates: str
    graphs: bool = True


IPC = "tensor-parallel ranks communicate over CUDA IPC memory"
CASES = {
    "tp2": Case(False, ("--tp", "2"), IPC),
    "tp2-without-graphs": Case(False, ("--tp", "2", "--no-cuda-graphs"), IPC, graphs=False),
    "tp4": Case(False, ("--tp", "4"), IPC),
    "pp2": Case(False, ("--pp", "2"), ""),
    "sparse-tp2": Case(True, ("--tp", "2"), IPC),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether attention is sparse. In float32, so that all tokens equal; without experts, which float32 graphs do
    not support.
    """
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    dense = make_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", **heads)
    sparse = make_dsa_checkpoint(tmp_path_factory.mktemp("sparse"), "deepseek_v32", first_k_dense_replace=4)
    return {False: dense, True: sparse}


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers(models: dict[bool, Path], tmp_path: Path, name: str) -> None:
    """Prompts are computed by the same server, in chunk graphs if the model is dense."""
    case = CASES[name]
    model = models[case.sparse]
    draw = random.Random(3)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    with cluster(tmp_path) as servers:
        server = servers.add("serve", model, "--device", "cuda:0", "--dtype", "float32", *SMALL, *case.flags)
        server.wait_ready()
        reference = load_reference(model, torch.float32).cuda()
        for together in (False, True):
            outputs = generate_all(server, prompts, NEW_TOKENS, together=together)
            assert all(same_tokens(reference, prompts, outputs, NEW_TOKENS, noise=None))
        server.check_clean()
        log = server.log.read_text()
        assert case.communicates in log
        assert ("CUDA graphs captured" in log) == case.graphs
        assert server.stop() == 0
