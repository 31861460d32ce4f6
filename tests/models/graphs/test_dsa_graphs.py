"""Sparse-attention decode in CUDA graphs: against transformers, and against the same decoder without graphs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.decoders.mla import MlaDecoder
from pdserve.models.graphs.capture import DecodeGraphs
from pdserve.models.graphs.dsa import DsaStep
from pdserve.models.graphs.mla import MlaStep
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, stored_format, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import (
    load_reference,
    make_dsa_checkpoint,
    quantise_checkpoint,
    reference_greedy,
    reference_logits,
)
from tests.memory.hisparse.hot_buffer import open_loaded
from tests.models.graphs.steps import run_graph

PAGE_SIZE, NUM_PAGES, MAX_BATCH, MAX_CONTEXT = 4, 512, 13, 200
TOLERANCE = 3e-5  # as in test_dsa_decoder.py


@pytest.mark.parametrize("sparse", [True, False], ids=["glm_moe_dsa", "deepseek_v3"])
def test_steps_follow_their_inputs_while_sequences_start_grow_and_end(tmp_path: Path, sparse: bool) -> None:
    """The captured step, run eagerly on the CPU, against the same tokens in an ordinary batch."""
    cpu, rng = torch.device("cpu"), random.Random(8)
    if sparse:
        make_dsa_checkpoint(tmp_path, "glm_moe_dsa", index_topk_pattern="FSFF")
    else:
        make_dsa_checkpoint(tmp_path, "deepseek_v3")
    source = locate_model(str(tmp_path))
    parameters = LatentParameters.allocate(source.config, device=cpu, dtype=torch.float32)
    load_weights(source, parameters.slots())
    decoder = DsaDecoder(parameters) if sparse else MlaDecoder(parameters)
    cache = decoder.make_cache(128, PAGE_SIZE)
    runner = ModelRunner(decoder, device=cpu, dtype=torch.float32)
    for pool in cache.pools:
        pool.data.normal_()
    step = (
        DsaStep(decoder, cache, max_batch=4, max_pages=24)
        if isinstance(decoder, DsaDecoder)
        else MlaStep(decoder, cache, max_batch=4, max_pages=24)
    )
    free = list(range(128))
    lengths: list[int] = []
    pages: list[list[int]] = []
    for _ in range(60):
        if len(pages) < 4 and rng.random() < 0.3:
            lengths.append(rng.randrange(30))
            pages.append([free.pop(rng.randrange(len(free))) for _ in range(-(-lengths[-1] // PAGE_SIZE))])
        elif pages and rng.random() < 0.2:
            gone = rng.randrange(len(pages))
            free += pages.pop(gone)
            del lengths[gone]
        for length, where in zip(lengths, pages, strict=True):
            if length == len(where) * PAGE_SIZE:
                where.append(free.pop(rng.randrange(len(free))))  # grows in place, as the scheduler's lists do
        slices = [
            SequenceSlice([rng.randrange(256)], start, where) for start, where in zip(lengths, pages, strict=True)
        ]
        size = rng.randint(max(len(slices), 1), 4)
        with torch.inference_mode():
            step.fill(slices, size)
            logits = decoder.logits(step.hidden(size))
        assert logits is not None
        if slices:
            expected = runner.forward(cache, slices)
            torch.testing.assert_close(logits[: len(slices)], expected, rtol=0, atol=TOLERANCE)
        lengths = [length + 1 for length in lengths]


def test_step_is_of_the_resident_kind_only_if_all_are_within_capacity(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    source = locate_model(str(make_dsa_checkpoint(tmp_path, "deepseek_v32")))
    decoder = DsaDecoder(LatentParameters.allocate(source.config, device=cpu, dtype=torch.float32))
    cache = decoder.make_hisparse_cache(32, PAGE_SIZE, hot_pages=24, slots=2, hot_rows=16, max_context=64)
    step = DsaStep(decoder, cache, max_batch=2, max_pages=16)
    pages = [[KvPage(page) for page in range(first, first + 11)] for first in (0, 11)]
    own = [HotPage(page) for page in cache.own_hot_pages]
    hot_pages = [own[:10], own[10:20]]
    for slot in (0, 1):
        open_loaded(cache, RequestSlot(slot), hot_pages[slot], pages[slot], 20, 40)

    def kind(*ends: int) -> int:
        return step.fill([SequenceSlice([1], end - 1, pages[slot], slot) for slot, end in enumerate(ends)], 2)

    assert step.num_kinds(1) == 2
    assert [kind(21), kind(40, 40)] == [1, 1]
    assert kind(40, 41) == 0
    cache.resize(RequestSlot(0), hot_pages[0][:5], 16)
    assert [kind(16, 21), kind(17, 21)] == [1, 0]
    assert DsaStep(decoder, decoder.make_cache(4, PAGE_SIZE), max_batch=1, max_pages=4).num_kinds(1) == 1


class Setup:
    """A tiny model on the GPU, its cache and graphs, and transformers' model on the CPU."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        architecture: Any,
        *,
        packed: bool = False,
        fp8_index: bool = False,
        fp8: bool = False,
        **overrides: Any,
    ) -> None:
        device = torch.device("cuda")
        make_dsa_checkpoint(directory, architecture, **overrides)
        if fp8:
            quantise_checkpoint(directory, (128, 128))
        source = locate_model(str(directory))
        kept = stored_format(source, "auto")
        parameters = LatentParameters.allocate(source.config, device=device, dtype=dtype, stored=kept)
        load_weights(source, parameters.slots(), tensor_names(source.config))
        self.reference: Any = None if fp8 else load_reference(directory)
        self.decoder: DsaDecoder | MlaDecoder
        if source.config.dsa is None:
            self.decoder = MlaDecoder(parameters)
        else:
            self.decoder = DsaDecoder(parameters, packed=packed, fp8_index=fp8_index)
        self.cache = self.decoder.make_cache(NUM_PAGES, PAGE_SIZE)
        self.graphs = DecodeGraphs(self.decoder, self.cache, max_batch=MAX_BATCH, max_context=MAX_CONTEXT)
        self._without_graphs = ModelRunner(self.decoder, device=device, dtype=dtype)

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        logits = self._without_graphs.forward(self.cache, slices)
        assert logits is not None
        return logits

    def prefill(self, lengths: list[int], room: int) -> tuple[list[list[int]], list[list[int]]]:
        """Random prompts, their rows in scattered pages with room for more; everything else in the cache is poison."""
        for pool in self.cache.pools:
            pool.data.fill_(50)
        free = random.Random(5).sample(range(NUM_PAGES), NUM_PAGES)
        prompts = [random.Random(index).choices(range(256), k=length) for index, length in enumerate(lengths)]
        pages = [[free.pop() for _ in range(-(-(length + room) // PAGE_SIZE))] for length in lengths]
        self.eager([SequenceSlice(ids, 0, where) for ids, where in zip(prompts, pages, strict=True)])
        return prompts, pages

    def contents(self) -> list[torch.Tensor]:
        return [pool.data.clone() for pool in self.cache.pools]


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """In float32 and without experts, whose products cannot be captured in float32."""
    pattern: dict[str, Any] = {"index_topk_pattern": "FSSF"} if request.param == "glm_moe_dsa" else {}
    directory = tmp_path_factory.mktemp(request.param)
    return Setup(directory, torch.float32, request.param, first_k_dense_replace=4, **pattern)


@pytest.fixture(
    scope="module",
    params=[
        ("deepseek_v3", {}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"packed": True}),
        ("deepseek_v32", {"fp8_index": True}),
        ("deepseek_v32", {"fp8": True}),
    ],
    ids=["v3", "bf16", "packed rows", "fp8 keys", "fp8 weights"],
)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """In bfloat16, with experts."""
    architecture, options = request.param
    return Setup(tmp_path_factory.mktemp("experts"), torch.bfloat16, architecture, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 13])
def test_greedy_tokens_equal_transformers_at_every_batch_size(dense: Setup, batch: int) -> None:
    """Contexts grow over page borders and beyond the 16 selected tokens; padded batches run in larger graphs."""
    steps = 12
    lengths = [1 + 7 * index for index in range(batch)]
    prompts, pages = dense.prefill(lengths, steps + 1)
    expected = [reference_greedy(dense.reference, ids, steps + 1) for ids in prompts]
    for step in range(steps):
        slices = [
            SequenceSlice([tokens[step]], length + step, where)
            for tokens, length, where in zip(expected, lengths, pages, strict=True)
        ]
        assert dense.graphs.size_for(slices) is not None
        logits = run_graph(dense.graphs, slices)
        assert logits.argmax(-1).tolist() == [tokens[step + 1] for tokens in expected]
    full = [ids + tokens[:steps] for ids, tokens in zip(prompts, expected, strict=True)]
    last = torch.stack([reference_logits(dense.reference, ids)[-1] for ids in full])
    torch.testing.assert_close(logits.cpu(), last, rtol=0, atol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_graph_with_experts_equals_eager_steps(mixed: Setup, batch: int) -> None:
    """The batch has the size of the graph: the same kernels run on the same shapes, so results are bitwise equal."""
    lengths = [5 + 9 * index for index in range(batch)]
    _, pages = mixed.prefill(lengths, 4)
    slices = [SequenceSlice([7], length, where) for length, where in zip(lengths, pages, strict=True)]
    before = mixed.contents()
    expected = mixed.eager(slices)
    by_eager = mixed.contents()
    for pool, old in zip(mixed.cache.pools, before, strict=True):
        pool.data.copy_(old)
    assert run_graph(mixed.graphs, slices).equal(expected)
    assert all(found.equal(known) for found, known in zip(mixed.contents(), by_eager, strict=True))


@pytest.mark.gpu
def test_padded_step_writes_only_its_rows(dense: Setup) -> None:
    check_padded_step(dense)


@pytest.mark.gpu
def test_padded_step_with_experts_writes_only_its_rows(mixed: Setup) -> None:
    check_padded_step(mixed)


def check_padded_step(model: Setup) -> None:
    lengths = [9, 30, 4, 17, 1]
    _, pages = model.prefill(lengths, 4)
    slices = [SequenceSlice([7], length, where) for length, where in zip(lengths, pages, strict=True)]
    before = model.contents()
    run_graph(model.graphs, slices)  # 5 rows in the graph of 8
    slots = {
        (where[piece.start // PAGE_SIZE], piece.start % PAGE_SIZE) for piece, where in zip(slices, pages, strict=True)
    }
    for pool, old in zip(model.cache.pools, before, strict=True):
        changed = pool.data.view(torch.uint8).flatten(2) != old.view(torch.uint8).flatten(2)
        for plane in pool._split_planes(changed):
            written = plane.any(-1).any(2).any(1)  # [page, token]
            assert {(page, token) for page, token in written.nonzero().tolist()} == slots


@pytest.mark.gpu
def test_steps_of_other_batches_do_not_affect_results(mixed: Setup) -> None:
    lengths = [40, 3, 77]
    _, pages = mixed.prefill(lengths, 4)
    slices = [SequenceSlice([5], length, where) for length, where in zip(lengths, pages, strict=True)]
    first = run_graph(mixed.graphs, slices).clone()
    run_graph(mixed.graphs, [slices[2]] * 13)
    run_graph(mixed.graphs, slices[1:2])
    assert run_graph(mixed.graphs, slices).equal(first)


@pytest.mark.gpu
def test_tokens_can_stay_on_the_device(mixed: Setup) -> None:
    lengths = [12, 50]
    _, pages = mixed.prefill(lengths, 4)
    known = [SequenceSlice([8 + index], length, pages[index]) for index, length in enumerate(lengths)]
    unknown = [SequenceSlice([0], length, pages[index]) for index, length in enumerate(lengths)]
    expected = run_graph(mixed.graphs, known).clone()
    assert not run_graph(mixed.graphs, unknown).equal(expected)
    assert run_graph(mixed.graphs, unknown, torch.tensor([8, 9], device="cuda")).equal(expected)


@pytest.mark.gpu
def test_batches_that_fit_a_graph(dense: Setup) -> None:
    pages = list(range(100))
    assert dense.graphs.size_for([SequenceSlice([1], MAX_CONTEXT - 1, pages)] * MAX_BATCH) is not None
    assert dense.graphs.size_for([SequenceSlice([1], MAX_CONTEXT, pages)]) is None
    with pytest.raises(ValueError, match="have 2 pages"):
        run_graph(dense.graphs, [SequenceSlice([1], 10, [3, 4])])
