"""Prompt chunks of models with latent attention: the step that graphs capture, run on a CPU, and CUDA graphs."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.decoders.mla import MlaDecoder
from pdserve.models.graphs.capture import ChunkGraphs
from pdserve.models.graphs.dsa_chunks import DsaChunkStep
from pdserve.models.graphs.mla import MlaChunkStep
from pdserve.models.graphs.steps import ChunkLimits
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import make_dsa_checkpoint
from tests.models.graphs.steps import run_graph

PAGE, NUM_PAGES, MAX_TOKENS, MAX_SLICES, CONTEXT = 8, 256, 96, 5, 512
TOLERANCE = 3e-5  # as in test_dsa_decoder.py
DTYPES = (torch.float32, torch.bfloat16)


def make_decoder(
    directory: Path, device: str, dtype: torch.dtype, *, fp8_index: bool = False, packed: bool = False, **sizes: Any
) -> DsaDecoder:
    source = locate_model(str(make_dsa_checkpoint(directory, "glm_moe_dsa", index_topk_pattern="FSFF", **sizes)))
    parameters = LatentParameters.allocate(source.config, device=torch.device(device), dtype=dtype)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    return DsaDecoder(parameters, fp8_index=fp8_index, packed=packed)


def make_latent_decoder(directory: Path, device: str, dtype: torch.dtype, **sizes: Any) -> MlaDecoder:
    """The decoder of a model that attends to all tokens."""
    source = locate_model(str(make_dsa_checkpoint(directory, "deepseek_v3", **sizes)))
    parameters = LatentParameters.allocate(source.config, device=torch.device(device), dtype=dtype)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    return MlaDecoder(parameters)


def chunk_steps(seed: int) -> Iterator[list[SequenceSlice]]:
    """Prompts in chunks of random lengths, several at a time, beside single tokens."""
    draw = random.Random(seed)
    free = draw.sample(range(NUM_PAGES), NUM_PAGES)
    prompts = [draw.choices(range(256), k=length) for length in (300, 40, 9, 1, 128, 64, 7)]
    pages = [[free.pop() for _ in range(-(-len(prompt) // PAGE))] for prompt in prompts]
    done = [0] * len(prompts)
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        slices, left = [], MAX_TOKENS
        for index in draw.sample(range(len(prompts)), MAX_SLICES):
            count = min(draw.choice([1, 1, 2, 16, 64, 95]), len(prompts[index]) - done[index], left)
            if count > 0:
                start = done[index]
                slices.append(SequenceSlice(prompts[index][start : start + count], start, pages[index]))
                done[index] += count
                left -= count
        if slices:
            yield slices


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "latent"])
def test_step_with_fixed_inputs_equals_an_ordinary_batch(tmp_path: Path, sparse: bool) -> None:
    decoder = (make_decoder if sparse else make_latent_decoder)(tmp_path, "cpu", torch.float32)
    caches = [decoder.make_cache(NUM_PAGES, PAGE) for _ in range(2)]
    for cache in caches:
        for pool in cache.pools:
            pool.data.fill_(torch.nan)
    limits = ChunkLimits(MAX_TOKENS, MAX_SLICES, CONTEXT // PAGE, last_only=True)
    step = (
        DsaChunkStep(decoder, caches[0], limits)
        if isinstance(decoder, DsaDecoder)
        else MlaChunkStep(decoder, caches[0], limits)
    )
    eager = ModelRunner(decoder, device=torch.device("cpu"), dtype=torch.float32)
    draw, steps = random.Random(2), 0
    for slices in chunk_steps(4):
        steps += 1
        tokens = step.size(slices)
        assert tokens is not None
        size = draw.randint(tokens, MAX_TOKENS)
        with torch.inference_mode():
            step.fill(slices, size)
            replaced = [draw.randrange(256) for _ in slices]
            step.replace_tokens(slices, torch.tensor(replaced))
            logits = decoder.logits(step.hidden(size)[: len(slices)])
        assert logits is not None
        expected = eager.forward(caches[1], slices, torch.tensor(replaced))
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    assert steps > 10
    for ours, theirs in zip(caches[0].pools, caches[1].pools, strict=True):
        assert ours.data.isnan().equal(theirs.data.isnan()), "a padded row was written"


def test_steps_that_no_graph_can_run_have_no_size(tmp_path: Path) -> None:
    decoder = make_decoder(tmp_path, "cpu", torch.float32)
    cache = decoder.make_hisparse_cache(32, PAGE, hot_pages=16, slots=2, hot_rows=16, max_context=64)
    step = DsaChunkStep(decoder, cache, ChunkLimits(32, 2, 64 // PAGE, last_only=True))
    own, pages = [HotPage(page) for page in cache.own_hot_pages], [KvPage(page) for page in range(8)]
    cache.open(RequestSlot(0), own[:8], 20, 64)
    assert step.size([SequenceSlice([1] * 20, 40, pages, 0)]) == 20
    cache.resize(RequestSlot(0), own[:3], 16)
    assert step.size([SequenceSlice([1] * 20, 40, pages, 0)]) is None, "its rows are not all on the device"
    plain = DsaChunkStep(decoder, decoder.make_cache(8, PAGE), ChunkLimits(32, 2, 64 // PAGE, last_only=True))
    assert plain.size([SequenceSlice([1], 64, pages)]) is None
    assert plain.size([SequenceSlice([1], 3, pages)] * 3) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*itertools.product(DTYPES, ("", "latent")), (torch.bfloat16, "fp8 index"), (torch.float32, "packed")],
)
def test_chunks_in_graphs_equal_chunks_without(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    sizes = {"first_k_dense_replace": 4} if dtype == torch.float32 else {}  # with experts, only 16 bits are captured
    decoder: DsaDecoder | MlaDecoder
    if kind == "latent":
        decoder = make_latent_decoder(tmp_path, "cuda", dtype, **sizes)
    else:
        fp8_index, packed = kind == "fp8 index", kind == "packed"
        decoder = make_decoder(tmp_path, "cuda", dtype, fp8_index=fp8_index, packed=packed, **sizes)
    caches = [decoder.make_cache(NUM_PAGES, PAGE) for _ in range(2)]
    graphs = ChunkGraphs(decoder, caches[0], max_tokens=MAX_TOKENS, max_slices=MAX_SLICES, max_context=CONTEXT)
    eager = ModelRunner(decoder, device=torch.device("cuda"), dtype=dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else 0.06
    if kind == "packed":
        tolerance = 4e-3  # as in test_dsa_packed.py
    for slices in chunk_steps(5):
        assert graphs.size_for(slices) is not None
        found, expected = run_graph(graphs, slices).clone(), eager.forward(caches[1], slices)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
