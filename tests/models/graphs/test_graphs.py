"""Decode in CUDA graphs against transformers and against the same decoder without graphs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels.attention import attention_plan
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.graphs import dense
from pdserve.models.graphs.capture import ChunkGraphs, DecodeGraphs, graph_batch_sizes, graph_token_counts
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights
from pdserve.models.runner import ModelRunner
from tests.checkpoints import TinyArchitecture, load_reference, make_checkpoint, reference_greedy, reference_logits
from tests.models.graphs.steps import run_graph

PAGE_SIZE, NUM_PAGES, MAX_BATCH, MAX_CONTEXT = 4, 512, 20, 200
TOLERANCE = 3e-5  # as in test_decoder.py


def test_batch_sizes_are_closer_together_for_small_batches() -> None:
    assert graph_batch_sizes(1) == [1]
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert graph_batch_sizes(8) == [1, 2, 4, 8]
    assert graph_batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_batch_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_batch_sizes(72) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72]
    assert graph_batch_sizes(256)[-9:] == [64, 80, 96, 112, 128, 160, 192, 224, 256]


def test_token_counts_are_multiples_of_a_tile_from_128_on() -> None:
    assert graph_token_counts(16) == [16]
    assert graph_token_counts(40) == [16, 32, 40]
    assert graph_token_counts(512) == [16, 32, 64, 128, 256, 384, 512]
    assert graph_token_counts(2048)[-4:] == [1664, 1792, 1920, 2048]


class Setup:
    """A tiny model on the GPU, its pool and graphs, and transformers' model on the CPU."""

    def __init__(self, directory: Path, architecture: TinyArchitecture) -> None:
        device = torch.device("cuda")
        make_checkpoint(directory, architecture)
        source = locate_model(str(directory))
        parameters = DecoderParameters.allocate(source.config, device=device, dtype=torch.float32)
        load_weights(source, parameters.slots())
        self.reference: Any = load_reference(directory)
        self.decoder = Decoder(parameters)
        self.cache = self.decoder.make_cache(NUM_PAGES, PAGE_SIZE)
        (self.pool,) = self.cache.pools
        self.graphs = DecodeGraphs(self.decoder, self.cache, max_batch=MAX_BATCH, max_context=MAX_CONTEXT)
        self._without_graphs = ModelRunner(self.decoder, device=device, dtype=torch.float32)

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        logits = self._without_graphs.forward(self.cache, slices)
        assert logits is not None
        return logits

    def prefill(self, lengths: list[int], room: int) -> tuple[list[list[int]], list[list[int]]]:
        """Random prompts, their KV in scattered pages with room for more; everything else in the pool is poison."""
        self.pool.data.fill_(50.0)
        free = random.Random(5).sample(range(NUM_PAGES), NUM_PAGES)
        prompts = [random.Random(index).choices(range(256), k=length) for index, length in enumerate(lengths)]
        pages = [[free.pop() for _ in range(-(-(length + room) // PAGE_SIZE))] for length in lengths]
        self.eager([SequenceSlice(ids, 0, where) for ids, where in zip(prompts, pages, strict=True)])
        return prompts, pages


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """gemma3_text has sliding windows."""
    return Setup(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 13, 20])
def test_greedy_tokens_equal_transformers_at_every_batch_size(setup: Setup, batch: int) -> None:
    """Contexts grow over page borders, beyond any length at capture; a padded batch runs in a larger graph."""
    steps = 12
    lengths = [1 + 7 * index for index in range(batch)]
    prompts, pages = setup.prefill(lengths, steps + 1)
    expected = [reference_greedy(setup.reference, ids, steps + 1) for ids in prompts]
    for step in range(steps):
        slices = [
            SequenceSlice([tokens[step]], length + step, where)
            for tokens, length, where in zip(expected, lengths, pages, strict=True)
        ]
        assert setup.graphs.size_for(slices) is not None
        logits = run_graph(setup.graphs, slices)
        assert logits.shape == (batch, setup.decoder.config.vocab_size)
        assert logits.argmax(-1).tolist() == [tokens[step + 1] for tokens in expected]
    full = [ids + tokens[:steps] for ids, tokens in zip(prompts, expected, strict=True)]
    last = torch.stack([reference_logits(setup.reference, ids)[-1] for ids in full])
    torch.testing.assert_close(logits.cpu(), last, rtol=0, atol=TOLERANCE)


@pytest.mark.gpu
def test_padded_step_writes_only_its_rows(setup: Setup) -> None:
    _, pages = setup.prefill([9, 30, 4, 17, 1], 4)
    slices = [
        SequenceSlice([7 + index], length, where)
        for index, (length, where) in enumerate(zip([9, 30, 4, 17, 1], pages, strict=True))
    ]
    before = setup.pool.data.clone()
    expected = setup.eager(slices)
    by_eager = setup.pool.data.clone()
    setup.pool.data.copy_(before)
    found = run_graph(setup.graphs, slices)  # 5 rows in the graph of 8
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(setup.pool.data, by_eager, rtol=0, atol=1e-5)
    written = (setup.pool.data != before).flatten(5).any(-1).any(3).any(2).any(1)  # [page, token]
    slots = {
        (where[piece.start // PAGE_SIZE], piece.start % PAGE_SIZE) for piece, where in zip(slices, pages, strict=True)
    }
    assert {(page, token) for page, token in written.nonzero().tolist()} == slots


@pytest.mark.gpu
def test_steps_of_other_batches_do_not_affect_results(setup: Setup) -> None:
    lengths = [40, 3, 77]
    _, pages = setup.prefill(lengths, 4)
    slices = [SequenceSlice([5], length, where) for length, where in zip(lengths, pages, strict=True)]
    first = run_graph(setup.graphs, slices).clone()
    run_graph(setup.graphs, [slices[2]] * 20)
    run_graph(setup.graphs, slices[1:2])
    assert run_graph(setup.graphs, slices).equal(first)


@pytest.mark.gpu
def test_tokens_can_stay_on_the_device(setup: Setup) -> None:
    lengths = [12, 50]
    _, pages = setup.prefill(lengths, 4)
    known = [SequenceSlice([8 + index], length, pages[index]) for index, length in enumerate(lengths)]
    unknown = [SequenceSlice([0], length, pages[index]) for index, length in enumerate(lengths)]
    expected = run_graph(setup.graphs, known).clone()
    assert not run_graph(setup.graphs, unknown).equal(expected)
    assert run_graph(setup.graphs, unknown, torch.tensor([8, 9], device="cuda")).equal(expected)


@pytest.mark.gpu
def test_batches_that_fit_a_graph(setup: Setup) -> None:
    pages = list(range(100))
    one = SequenceSlice([1], 10, pages)
    assert setup.graphs.size_for([one] * MAX_BATCH) is not None
    assert setup.graphs.size_for([SequenceSlice([1], MAX_CONTEXT - 1, pages)]) is not None
    assert setup.graphs.size_for([]) is None
    assert setup.graphs.size_for([one] * (MAX_BATCH + 1)) is None
    assert setup.graphs.size_for([SequenceSlice([1], MAX_CONTEXT, pages)]) is None
    assert setup.graphs.size_for([one, SequenceSlice([1, 2], 10, pages)]) is None
    with pytest.raises(ValueError, match="have 2 pages"):
        run_graph(setup.graphs, [SequenceSlice([1], 10, [3, 4])])


def test_steps_of_few_sequences_with_few_keys_are_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "FEW_KEYS", 20)
    monkeypatch.setattr(dense, "most_sequences", lambda *_: 2)
    source = locate_model(str(make_checkpoint(tmp_path, "qwen3")))
    decoder = Decoder(DecoderParameters.allocate(source.config, device=torch.device("cpu"), dtype=torch.float32))
    step = dense.DenseStep(decoder, decoder.make_cache(16, PAGE_SIZE), max_batch=4, max_pages=8)
    assert [step.num_kinds(size) for size in (1, 2, 4)] == [2, 2, 1]

    def kind(*ends: int, size: int) -> int:
        return step.fill([SequenceSlice([1], end - 1, list(range(8))) for end in ends], size)

    assert [kind(20, size=1), kind(21, size=1)] == [1, 0]
    assert [kind(3, 20, size=2), kind(3, 21, size=2)] == [1, 0]
    assert [kind(1, 2, 3, size=4), kind(size=1)] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_sequences_that_get_many_keys_change_the_kind_of_step(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits equal those of the kernels for any number of keys; everything else in the pool is NaN."""
    device, dtype, few = torch.device("cuda"), torch.bfloat16, 40
    directory = make_checkpoint(
        tmp_path, "qwen3", hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2
    )
    source = locate_model(str(directory))
    parameters = DecoderParameters.allocate(source.config, device=device, dtype=dtype)
    load_weights(source, parameters.slots())
    decoder = Decoder(parameters)
    caches = [decoder.make_cache(64, 16) for _ in range(2)]
    for cache in caches:
        cache.pools[0].data.fill_(torch.nan)
    monkeypatch.setattr(attention_plan, "FEW_KEYS", few)
    graphs = DecodeGraphs(decoder, caches[0], max_batch=2, max_context=MAX_CONTEXT)
    eager = ModelRunner(decoder, device=device, dtype=dtype)
    choice = random.Random(4)
    tokens = [choice.choices(range(256), k=few + 10) for _ in range(batch)]
    pages = [list(range(8 * row, 8 * row + 8)) for row in range(batch)]
    prompt = [SequenceSlice(ids[:30], 0, where) for ids, where in zip(tokens, pages, strict=True)]
    for cache in caches:
        eager.forward(cache, prompt)
    kinds = []
    for position in range(30, few + 10):
        slices = [SequenceSlice([ids[position]], position, where) for ids, where in zip(tokens, pages, strict=True)]
        found = run_graph(graphs, slices).clone()
        kinds.append(graphs._last_kind)
        with monkeypatch.context() as patches:
            patches.setattr(attention_plan, "FEW_KEYS", 0)
            expected = eager.forward(caches[1], slices)
        torch.testing.assert_close(found, expected, rtol=0, atol=0.06)
    assert kinds == [1] * (few - 30) + [0] * 10
    unwritten = [cache.pools[0].data.isnan() for cache in caches]
    assert unwritten[0].equal(unwritten[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decode_rows", [False, True])
def test_chunks_in_graphs_equal_chunks_without(tmp_path: Path, decode_rows: bool, dtype: torch.dtype) -> None:
    """Heads of 128 elements, which have a kernel of their own in 16 bits. Prompts in chunks of random lengths, several
    at a time, beside single tokens; everything else in the pool is NaN.
    """
    device, page_size, max_tokens, max_slices = torch.device("cuda"), 16, 700, 6
    directory = make_checkpoint(
        tmp_path,
        "qwen3",
        hidden_size=256,
        head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    source = locate_model(str(directory))
    parameters = DecoderParameters.allocate(source.config, device=device, dtype=dtype)
    load_weights(source, parameters.slots())
    decoder = Decoder(parameters)
    caches = [decoder.make_cache(1024, page_size) for _ in range(2)]
    for cache in caches:
        cache.pools[0].data.fill_(torch.nan)
    graphs = ChunkGraphs(
        decoder,
        caches[0],
        max_tokens=max_tokens,
        max_slices=max_slices,
        max_context=4096,
        decode_rows=decode_rows,
    )
    eager = ModelRunner(decoder, device=device, dtype=dtype)
    choice = random.Random(3)
    free = choice.sample(range(1024), 1024)
    prompts = [choice.choices(range(256), k=length) for length in (1500, 40, 300, 129, 1000, 64, 7, 700)]
    pages = [[free.pop() for _ in range(-(-len(prompt) // page_size))] for prompt in prompts]
    done = [0] * len(prompts)
    steps = 0
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        slices, left = [], max_tokens
        for index in choice.sample(range(len(prompts)), 5):
            count = min(choice.choice([1, 2, 16, 100, 128, 300, 699]), len(prompts[index]) - done[index], left)
            if count > 0:
                start = done[index]
                slices.append(SequenceSlice(prompts[index][start : start + count], start, pages[index]))
                done[index] += count
                left -= count
        if not slices:
            continue
        steps += 1
        assert graphs.size_for(slices) is not None
        found, expected = run_graph(graphs, slices).clone(), eager.forward(caches[1], slices)
        tolerance = TOLERANCE if dtype == torch.float32 else 0.06
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert steps > 10
    unwritten = [cache.pools[0].data.isnan() for cache in caches]
    assert unwritten[0].equal(unwritten[1])
    assert graphs.size_for([SequenceSlice([1], 10, pages[0])] * (max_slices + 1)) is None
    assert graphs.size_for([SequenceSlice([1] * (max_tokens + 1), 0, pages[0])]) is None
    assert graphs.size_for([SequenceSlice([1], 4096, pages[0])]) is None
