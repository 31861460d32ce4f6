"""The pair on one GPU: two processes, the CUDA Mooncake wheel, KV written from device memory to device memory."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import load_tokenizer
from tests.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint
from tests.cluster.greedy import BF16_LOGIT_NOISE, generate_all, same_tokens, share_of_same_choices
from tests.cluster.servers import Server, cluster

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
LENGTHS = (1, 15, 16, 17, 47, 48, 49, 200)
CASES: dict[str, tuple[Any, int]] = {"llama": ("llama", 16), "qwen2": ("qwen2", 64), "qwen3": ("qwen3", 4)}
SMOLLM2_FILE = os.environ.get("PDSERVE_SMOLLM2")
SMOLLM2_LOGIT_NOISE = 0.5
"""As BF16_LOGIT_NOISE, for logits around 20 (ulp 0.125)."""
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "Explain in one paragraph why the sky is blue during the day and red in the evening. " * 12,
)


class Pair(NamedTuple):
    decode: Server
    reference: Any
    prompts: list[list[int]]
    noise: float | None


@pytest.fixture(scope="module", params=[(case, dtype) for case in CASES for dtype in ("float32", "bfloat16")], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    case, dtype = request.param
    architecture, decode_page = CASES[case]
    torch_dtype = getattr(torch, dtype)
    model = make_checkpoint(tmp_path_factory.mktemp("model"), architecture, dtype=torch_dtype)
    transport = {"float32": "tcp", "bfloat16": "nvlink"}[dtype]
    flags = ("--device", "cuda", "--dtype", dtype, "--kv-tokens", "4096", "--transport", transport)
    with cluster(tmp_path_factory.mktemp("logs")) as started:
        graphs = "--cuda-graphs" if dtype == "bfloat16" else "--no-cuda-graphs"
        prefill, decode = started.pair(
            model,
            (*flags, "--page-size", "16", "--chunk-size", "48"),
            (*flags, graphs, "--page-size", str(decode_page)),
        )
        draw = random.Random(3)
        prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        noise = BF16_LOGIT_NOISE if dtype == "bfloat16" else None
        yield Pair(decode, load_reference(model, torch_dtype).cuda(), prompts, noise)
        prefill.check_clean()
        decode.check_clean()
        assert decode.info()["counters"]["chunks_verified"] > 0
        assert f"goes over {transport}\n" in prefill.log.read_text()


@pytest.mark.parametrize("together", [False, True], ids=["alone", "in one batch"])
def test_greedy_tokens_equal_transformers(pair: Pair, together: bool) -> None:
    outputs = generate_all(pair.decode, pair.prompts, NEW_TOKENS, together=together)
    same_tokens(pair.reference, pair.prompts, outputs, NEW_TOKENS, noise=pair.noise)
    assert share_of_same_choices(pair.reference, pair.prompts, outputs) > 0.9, "more differences than ties explain"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def smollm2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """The real model behind one prefill server and two decode servers, one with CUDA graphs and one without."""
    if SMOLLM2_FILE is None:
        pytest.skip("SmolLM2's weights: set PDSERVE_SMOLLM2 to the path of its GGUF file")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    file, dtype = Path(SMOLLM2_FILE), request.param
    tokenizer = load_tokenizer(locate_model(str(file)))
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in QUESTIONS
    ]
    flags = ("--device", "cuda", "--dtype", dtype, "--kv-tokens", "8192")
    with cluster(tmp_path_factory.mktemp("smollm2")) as started:
        prefill = started.add("prefill", file, *flags, "--chunk-size", "64")
        decodes = {
            graphs: started.add("decode", file, "--prefill", prefill.endpoint, *flags, graphs)
            for graphs in ("--cuda-graphs", "--no-cuda-graphs")
        }
        # transformers reads the file itself, so the reference uses no code of pdserve
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        )
        prefill.wait_ready(peers=2)
        noise = SMOLLM2_LOGIT_NOISE if dtype == "bfloat16" else None
        pairs = {
            graphs: Pair(decode.wait_ready(peers=1), reference.cuda().eval(), prompts, noise)
            for graphs, decode in decodes.items()
        }
        yield pairs
        for server in (prefill, *decodes.values()):
            server.check_clean()


@pytest.mark.parametrize("graphs", ["--cuda-graphs", "--no-cuda-graphs"])
def test_smollm2_tokens_equal_transformers(smollm2: dict[str, Pair], graphs: str) -> None:
    pair = smollm2[graphs]
    for together in (False, True):
        outputs = generate_all(pair.decode, pair.prompts, NEW_TOKENS, together=together)
        same_tokens(pair.reference, pair.prompts, outputs, NEW_TOKENS, noise=pair.noise)
