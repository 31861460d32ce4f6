"""Sparse-attention models through a pair on one GPU: prompts, transfers and decode steps in CUDA graphs."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, LatentArchitecture, load_reference, make_dsa_checkpoint
from tests.cluster.greedy import BF16_LOGIT_NOISE, generate_all, same_tokens, share_of_same_choices
from tests.cluster.servers import Server, cluster

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
LENGTHS = (1, 9, 16, 17, 49, 200)


class Case(NamedTuple):
    architecture: LatentArchitecture
    dtype: torch.dtype
    overrides: dict[str, Any]
    decode_page: int
    in_graphs: bool


# Steps in float32 can be captured only without experts. In bfloat16, rounding would change which experts and tokens are
# selected, so there are no experts, and index_topk selects all tokens.
CASES = {
    "deepseek-v3-fp32": Case("deepseek_v3", torch.float32, {"first_k_dense_replace": 4}, 4, in_graphs=True),
    "deepseek-v3-bf16": Case("deepseek_v3", torch.bfloat16, {"first_k_dense_replace": 4}, 64, in_graphs=True),
    "deepseek-fp32": Case("deepseek_v32", torch.float32, {"first_k_dense_replace": 4}, 4, in_graphs=True),
    "glm-bf16": Case(
        "glm_moe_dsa",
        torch.bfloat16,
        {"first_k_dense_replace": 4, "index_topk": 256, "index_topk_pattern": "FSSF"},
        64,
        in_graphs=True,
    ),
    "deepseek-experts-fp32": Case("deepseek_v32", torch.float32, {}, 16, in_graphs=False),
}


class Pair(NamedTuple):
    decode: Server
    reference: Any
    prompts: list[list[int]]
    noise: float | None


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("model")
    model = make_dsa_checkpoint(directory, case.architecture, dtype=case.dtype, **case.overrides)
    flags = ("--device", "cuda", "--dtype", str(case.dtype)[6:], "--kv-tokens", "4096")
    with cluster(tmp_path_factory.mktemp("logs")) as started:
        prefill, decode = started.pair(
            model,
            (*flags, "--page-size", "16", "--chunk-size", "48"),
            (*flags, "--page-size", str(case.decode_page)),
        )
        draw = random.Random(3)
        prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        noise = BF16_LOGIT_NOISE if case.dtype == torch.bfloat16 else None
        yield Pair(decode, load_reference(model, case.dtype).cuda(), prompts, noise)
        prefill.check_clean()
        decode.check_clean()
        assert decode.info()["counters"]["chunks_verified"] > 0
        assert ("CUDA graphs captured" in decode.log.read_text()) == case.in_graphs


@pytest.mark.parametrize("together", [False, True], ids=["alone", "in one batch"])
def test_greedy_tokens_equal_transformers(pair: Pair, together: bool) -> None:
    outputs = generate_all(pair.decode, pair.prompts, NEW_TOKENS, together=together)
    same_tokens(pair.reference, pair.prompts, outputs, NEW_TOKENS, noise=pair.noise)
    assert share_of_same_choices(pair.reference, pair.prompts, outputs) > 0.9, "more differences than ties explain"
