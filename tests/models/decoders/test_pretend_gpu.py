"""Decode steps as on a GPU (Triton, CUDA graphs, pinned buffers, overlap scheduling), on a simulated GPU.

Tests marked `gpu` use a real one. These tests find most of the same errors without a GPU: see pretend_gpu.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pdserve.common.sampling import SamplingParams
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.hisparse.slot_tables import buffer_pages
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvCache
from pdserve.models.graphs.inputs import InputBuffer
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.host_copies import ReadBack, upload
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.runner import ModelRunner
from pdserve.models.sampling.sampler import Sampler
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.executor import Executor, PendingStep
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint, pack_experts, quantise_checkpoint
from tests.int4_checkpoints import pack_checkpoint
from tests.kernels.interpreter import INTERPRETED
from tests.memory.hisparse.hot_buffer import open_loaded
from tests.models.pretend_gpu import CPU, DEVICE, PretendGpu
from tests.models.sampling.test_sampling import batch_of_everything, choose

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU"),
    # padded rows are computed from arbitrary memory
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
    # Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

PAGE_SIZE, NUM_PAGES, MAX_CONTEXT = 8, 32, 64
TOP_K = HOT_ROWS = 16
PROMPTS = ([5, 3, 200, 7, 7], [(11 * at * at + at) % 256 for at in range(44)])
PAGES = ([KvPage(page) for page in (9, 30, 2)], [KvPage(page) for page in (4, 21, 3, 17, 0, 28, 13)])
SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(top_k=9, seed=34))
"""With this seed, errors of 0.01 in logits, as 16 bits have them on another processor, do not change tokens."""
STEPS = 6


class Model(NamedTuple):
    """The KV of the prompts in a CPU cache, their first tokens, and the following ones."""

    source: ModelSource
    dtype: torch.dtype
    cache: KvCache
    first: list[int]
    expected: list[list[int]]


def prefilled(directory: Path, dtype: torch.dtype) -> Model:
    source = locate_model(str(directory))
    runner = ModelRunner.load(source, device=CPU, dtype=dtype)
    cache = runner.make_cache(NUM_PAGES, PAGE_SIZE)
    prompts = [SequenceSlice(prompt, 0, pages) for prompt, pages in zip(PROMPTS, PAGES, strict=True)]
    logits = runner.forward(cache, prompts)
    assert logits is not None
    first = logits.argmax(-1).tolist()
    saved = [pool.data.clone() for pool in cache.pools]
    expected = decode(Executor(runner, cache, [], overlap=True), first)
    for pool, content in zip(cache.pools, saved, strict=True):
        pool.data.copy_(content)
    return Model(source, dtype, cache, first, expected)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In float16: 16 bits have kernels of their own, and Triton's interpreter does not support bfloat16. The first
    layer has a sliding window.
    """
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"sliding_window": 13, "sliding_window_pattern": 2}
    return prefilled(make_checkpoint(tmp_path_factory.mktemp("dense"), "gemma3_text", **sizes), torch.float16)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Its two layers share a selection. It has no experts: torch's grouped product in float32 waits for the device."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"index_topk": TOP_K, "index_topk_pattern": "FS", "first_k_dense_replace": 2}
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp("sparse"), "glm_moe_dsa", **sizes)
    return prefilled(directory, torch.float32)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With experts, in fp8. The CPU expands them; the GPU does not quantise the activations of few rows."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"index_topk": TOP_K, "n_routed_experts": 4, "n_group": 1, "moe_intermediate_size": 160}
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp("experts"), "deepseek_v32", **sizes)
    quantise_checkpoint(directory, (128, 128))
    return prefilled(directory, torch.float32)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Latent attention to all tokens."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3", first_k_dense_replace=2, **sizes)
    return prefilled(directory, torch.float32)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In 4 bits, with biases. The CPU expands them, the GPU does not."""
    directory = make_checkpoint(tmp_path_factory.mktemp("int4"), "qwen2", num_hidden_layers=2)
    pack_checkpoint(directory, "awq", 32)
    return prefilled(directory, torch.float32)


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Experts in MXFP4, with biases. The CPU expands them, the GPU does not."""
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    directory = make_checkpoint(tmp_path_factory.mktemp("mxfp4"), "gpt_oss", **sizes)
    pack_experts(directory)
    return prefilled(directory, torch.float32)


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with PretendGpu() as pretended:
        use_own_stream(DEVICE)
        yield pretended


def decode(executor: Executor, first: Sequence[int], between: Any = lambda _step: None) -> list[list[int]]:
    """The tokens of all sequences; each step starts before the previous one is read back. `between` is called before
    each. Half-way the sequences change their rows in the batch.
    """
    tokens: list[list[int]] = [[] for _ in first]
    batches = [[0, 1] if 2 * step < STEPS else [1, 0] for step in range(STEPS)]
    under_way: list[PendingStep] = []

    def finish() -> None:
        results = under_way.pop(0).finish()
        assert results is not None
        for sequence, result in zip(batches.pop(0), results, strict=True):
            tokens[sequence].append(result.drawn[0].token)

    before: list[int] = []
    for step, batch in enumerate(batches[:]):
        between(step)
        rows = [
            StepRow(
                token_ids=() if step else (first[sequence],),
                start=len(PROMPTS[sequence]) + step,
                pages=PAGES[sequence],
                draws=(Draw(SAMPLING[sequence], step + 1),),
                follows=before.index(sequence) if step else None,
                hot_slot=RequestSlot(sequence) if isinstance(executor.cache, HiSparseCache) else None,
            )
            for sequence in batch
        ]
        under_way.append(executor.start(rows))
        before = batch
        if step:
            finish()
    finish()
    return tokens


def on_gpu(model: Model, cache: KvCache, runner: ModelRunner) -> Executor:
    """With the prefilled KV in `cache`, and captured steps."""
    for source, target in zip(model.cache.pools, cache.pools, strict=True):
        target.data.copy_(source.data)
    graphs = runner.capture_graphs(cache, max_batch=len(PROMPTS), max_context=MAX_CONTEXT)
    assert graphs is not None
    return Executor(runner, cache, [], overlap=True)


@pytest.mark.parametrize("name", ["dense", "sparse", "experts", "latent", "int4", "mxfp4"])
def test_steps_in_graphs_equal_the_cpu_and_do_not_wait(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Model = request.getfixturevalue(name)
    if name == "experts":
        monkeypatch.setattr("pdserve.models.weights.fp8.supports_fp8", lambda device: device.type == "cuda")
    with PretendGpu() as gpu:
        use_own_stream(DEVICE)
        runner = ModelRunner.load(model.source, device=DEVICE, dtype=model.dtype)
        if name in ("int4", "mxfp4"):
            expanded = ModelRunner.weight_bytes(model.source, model.dtype, device=CPU)
            assert runner.held_weight_bytes < 0.7 * expanded, "weights were expanded"
        executor = on_gpu(model, runner.make_cache(NUM_PAGES, PAGE_SIZE), runner)
        with gpu.no_waits():
            assert decode(executor, model.first) == model.expected


@pytest.mark.parametrize(("name", "decode_rows"), [("dense", False), ("dense", True), ("latent", True)])
def test_chunks_in_graphs_equal_the_cpu_and_do_not_wait(
    name: str, decode_rows: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, chunks over earlier ones, and a decode token beside a chunk, whose token is only on the device."""
    model: Model = request.getfixturevalue(name)
    with PretendGpu() as gpu:
        use_own_stream(DEVICE)
        check_chunks(gpu, model, decode_rows, monkeypatch)


def check_chunks(gpu: PretendGpu, model: Model, decode_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.models.graphs.chunks.COPIED_TOKENS", 512)  # every 128 are a program to interpret
    short, long = PROMPTS
    steps = [
        [SequenceSlice(long[:14], 0, PAGES[1])],
        [SequenceSlice(short, 0, PAGES[0]), SequenceSlice(long[14:25], 14, PAGES[1])],
        [SequenceSlice([model.first[0]], len(short), PAGES[0]), SequenceSlice(long[25:38], 25, PAGES[1])],
    ]
    on_cpu = ModelRunner.load(model.source, device=CPU, dtype=model.dtype)
    cpu_cache = on_cpu.make_cache(NUM_PAGES, PAGE_SIZE)
    expected = [on_cpu.forward(cpu_cache, slices) for slices in steps]
    runner = ModelRunner.load(model.source, device=DEVICE, dtype=model.dtype)
    cache = runner.make_cache(NUM_PAGES, PAGE_SIZE)
    graphs = runner.capture_chunk_graphs(
        cache, max_tokens=16, max_slices=4, max_context=MAX_CONTEXT, decode_rows=decode_rows
    )
    assert graphs is not None
    assert all(graphs.size_for(slices) is not None for slices in steps)
    steps[2][0] = SequenceSlice([0], len(short), PAGES[0])
    following = upload([model.first[0], 0], torch.long, DEVICE)
    found = []
    for slices in steps:
        with gpu.no_waits():
            logits = runner.forward(cache, slices, following if slices is steps[2] else None)
        assert logits is not None
        found.append(logits.to(CPU))
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)


def test_hot_buffers_change_between_steps_in_flight(gpu: PretendGpu, sparse: Model) -> None:
    """The long sequence is evicting at first, then fully resident again. The short one has to give up its pages; steps
    and commands do not wait for each other.
    """
    runner = ModelRunner.load(sparse.source, device=DEVICE, dtype=sparse.dtype)
    cache = runner.make_hisparse_cache(
        NUM_PAGES, PAGE_SIZE, hot_pages=16, slots=2, hot_rows=HOT_ROWS, max_context=MAX_CONTEXT
    )
    gpu.pin(cache.host.data)
    short, long = RequestSlot(0), RequestSlot(1)
    hot_pages = [HotPage(page) for page in cache.own_hot_pages]
    first = buffer_pages(HOT_ROWS, PAGE_SIZE)
    of_short, of_long = hot_pages[:first], hot_pages[first:]
    executor = on_gpu(sparse, cache, runner)
    open_loaded(cache, short, [*of_short, of_long[-1]], PAGES[0], len(PROMPTS[0]), 4 * PAGE_SIZE)
    open_loaded(cache, long, of_long[:first], PAGES[1], len(PROMPTS[1]), HOT_ROWS)
    misses = []

    def between(step: int) -> None:
        if step == 2:
            cache.resize(short, of_short, HOT_ROWS)
        if step == 4:
            misses.append(cache.tables.lookups.as_subclass(torch.Tensor)[0, 1].clone())
            tokens = len(PROMPTS[1]) + step
            open_loaded(cache, long, of_long[:8], PAGES[1], tokens, 8 * PAGE_SIZE)

    with gpu.no_waits():
        assert decode(executor, sparse.first, between) == sparse.expected
    misses.append(cache.tables.lookups.as_subclass(torch.Tensor)[0, 1])
    assert misses[0] > 0, "no row was fetched"
    assert misses[1] == misses[0], "rows were fetched although all were resident"
    cache.check_integrity()


def test_chunks_over_hot_buffers_equal_the_cpu_and_do_not_wait(gpu: PretendGpu, sparse: Model) -> None:
    """Prompts are computed in fully resident hot buffers, also beside a decode token that is only on the device. The
    long one is evicting afterwards; decode steps are CUDA graphs.
    """
    runner = ModelRunner.load(sparse.source, device=DEVICE, dtype=sparse.dtype)
    cache = runner.make_hisparse_cache(
        NUM_PAGES, PAGE_SIZE, hot_pages=16, slots=2, hot_rows=HOT_ROWS, max_context=MAX_CONTEXT
    )
    gpu.pin(cache.host.data)
    assert runner.capture_graphs(cache, max_batch=len(PROMPTS), max_context=MAX_CONTEXT) is not None
    hot_pages = [HotPage(page) for page in cache.own_hot_pages]
    (short, long), (of_short, of_long) = PROMPTS, (hot_pages[:4], hot_pages[4:10])
    cache.open(RequestSlot(0), of_short, 0, 4 * PAGE_SIZE)
    cache.open(RequestSlot(1), of_long, 0, 6 * PAGE_SIZE)
    steps = [
        [SequenceSlice(short, 0, PAGES[0], 0)],
        [SequenceSlice([0], len(short), PAGES[0], 0), SequenceSlice(long[:20], 0, PAGES[1], 1)],
        [SequenceSlice(long[20:], 20, PAGES[1], 1)],
    ]
    following = upload([sparse.first[0], 0], torch.long, DEVICE)
    found = []
    for slices in steps:
        with gpu.no_waits():
            logits = runner.forward(cache, slices, following if slices is steps[1] else None)
        assert logits is not None
        found.append(logits.to(CPU).argmax(-1).tolist())
    assert [found[0][0], found[2][0]] == sparse.first
    assert found[1][0] == sparse.expected[0][0]
    cache.resize(RequestSlot(1), of_long[: buffer_pages(HOT_ROWS, PAGE_SIZE)], HOT_ROWS)
    with gpu.no_waits():
        assert decode(Executor(runner, cache, [], overlap=True), sparse.first) == sparse.expected
    assert cache.tables.lookups.as_subclass(torch.Tensor)[0, 1] > 0
    cache.check_integrity()


def test_no_sampling_method_waits_for_the_device(gpu: PretendGpu) -> None:
    logits, choices = batch_of_everything()
    expected = choose(logits, choices, [4])
    on_device, sampler = logits.to(DEVICE), Sampler([4])
    with gpu.no_waits():
        tokens = sampler.sample(on_device, choices)
        values = ReadBack([tokens])
    assert values() == [expected]


class TestSimulatedGpu:
    """The simulated GPU detects violations of CUDA's rules."""

    def test_tensors_of_two_devices_are_refused(self, gpu: PretendGpu) -> None:
        values = torch.arange(3, device=DEVICE)
        assert (values.device, (values + 1).device, values.cpu().device) == (DEVICE, DEVICE, CPU)
        assert gpu.waits == ["copy_"]
        with pytest.raises(RuntimeError, match="all tensors must be on one device"):
            values + torch.arange(3)
        with pytest.raises(TypeError, match="to numpy"):
            values.numpy()

    @pytest.mark.parametrize(
        "wait",
        [
            lambda values: values.tolist(),
            lambda values: bool(values[0] > 0),
            lambda values: values[values > 0],
            lambda values: values.cpu(),
            lambda values: values.copy_(torch.arange(3)),
            lambda values: values.new_tensor([1, 2]),
            lambda values: torch.tensor([1], device=values.device),
            lambda values: values.__setitem__(values + 0, 7),
        ],
    )
    def test_forbidden_wait_is_detected(self, gpu: PretendGpu, wait: Any) -> None:
        values = torch.arange(3, device=DEVICE)
        wait(values)
        assert len(gpu.waits) == 1
        with gpu.no_waits(), pytest.raises(AssertionError, match="waits for the device"):
            wait(values)

    def test_buffer_that_is_refilled_too_early_is_detected(self, gpu: PretendGpu) -> None:
        inputs = InputBuffer({"values": 4}, DEVICE)
        inputs.host["values"][:] = 1
        inputs.upload(4)
        inputs.host["values"][:] = 2
        with pytest.raises(AssertionError, match="changed before a copy to the device had read it"):
            gpu.settle()

    def test_result_is_garbage_until_it_arrives(self, gpu: PretendGpu) -> None:
        values = ReadBack([upload([1, 2], torch.long, DEVICE)])
        assert values._values.isnan().all()
        assert values() == [[1.0, 2.0]]
        assert not gpu.waits

    def test_work_on_the_legacy_default_stream_is_detected(self) -> None:
        with PretendGpu():
            memory = torch.empty(3, device=DEVICE)
            for work in (memory.zero_, lambda: memory + 1, lambda: memory.copy_(torch.ones(3)), memory.cpu):
                with pytest.raises(AssertionError, match="on the legacy default stream"):
                    work()
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):  # type: ignore[no-untyped-call]
                assert memory.fill_(2).view(3, 1).tolist() == [[2.0]] * 3
            with pytest.raises(AssertionError, match="on the legacy default stream"):
                memory.zero_()

    def test_replay_repeats_operations_but_not_host_decisions(self, gpu: PretendGpu) -> None:
        values, factor = torch.ones(3, device=DEVICE), 2
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            doubled = (values * factor).view(3, 1)
        values.fill_(5)
        factor = 3
        graph.replay()
        assert doubled.flatten().tolist() == [10.0, 10.0, 10.0]
        with pytest.raises(AssertionError, match="waits for the device"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            values.sum().item()
        assert gpu.waits == ["tolist"]
