"""The parts of GPU benchmarks that run without a GPU. They use the engine's classes directly, not through a server."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import (
    dsa_engine,
    engine,
    fp8_linear,
    grammar,
    int4_linear,
    mla_engine,
    one_rank,
    packed_experts,
    rank_of_eight,
    ttft,
)
from benchmarks.gpu_timing import PRODUCT_RATE
from pdserve.kernels.backends.few_rows_cuda import Tiles
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.dense_mla import tile_plan
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.quantization import Int4Format
from pdserve.models.config.sharding import WHOLE
from pdserve.models.decoders import latent
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.decoders.slots import Slot
from pdserve.models.grammar.compiler import GrammarCompiler
from pdserve.models.graphs.capture import DecodeGraphs, StepGraphs
from pdserve.models.layers.batch import SequenceSlice
from pdserve.scheduler.ranks.executor import Executor
from tests.kernels.interpreter import INTERPRETED
from tests.models.pretend_gpu import DEVICE, PretendGpu

CPU = torch.device("cpu")
META: dict[str, Any] = {"device": torch.device("meta"), "dtype": torch.bfloat16}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dsa_engine, engine, mla_engine):
        monkeypatch.setattr(module, "DEVICE", CPU)


def sparse_config() -> ModelConfig:
    config = dsa_engine.deepseek_v32(2, 1, mlp=64, max_context=96)
    assert config.dsa is not None
    assert config.moe is not None
    moe = replace(config.moe, num_experts=16, expert_size=16, shared_size=16)
    sizes: dict[str, Any] = {"q_rank": 16, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
    sizes |= {"index_heads": 4, "index_dim": 16, "index_topk": 16}
    return replace(config, vocab_size=320, hidden_size=32, num_heads=2, moe=moe, mla=replace(config.dsa, **sizes))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("hot_rows", [None, 32])
def test_sparse_benchmark_steps_run_in_sequence(hot_rows: int | None) -> None:
    bench = dsa_engine.Engine(sparse_config(), sequences=2, page_size=8, hot_rows=hot_rows)
    slices = bench.sequences(2, 96, steps=3)
    for _ in range(3):
        assert bench.eager(slices).isfinite().all()
        slices = dsa_engine.following(slices)
    assert [piece.start for piece in slices] == [96, 96]
    hits, misses = bench.lookups()
    assert (hits + misses > 0) == (hot_rows is not None)
    assert bench.floor_bytes(2, 96) > bench.floor_bytes(1, 96)


@pytest.mark.usefixtures("on_cpu")
def test_latent_benchmark_steps_read_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mla_engine.deepseek_r1(2, 1, mlp=64, max_context=96)
    assert config.dsa is None
    assert config.mla is not None
    sparse = sparse_config()
    sizes: dict[str, Any] = {"q_rank": 16, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
    small = replace(config, vocab_size=320, hidden_size=32, num_heads=2, moe=sparse.moe)
    bench = mla_engine.Engine(replace(small, mla=replace(config.mla, **sizes)), sequences=2, page_size=8)
    for name, steps in {"WARM_STEPS": 2, "TIMED_STEPS": 3, "ALL_STEPS": 8}.items():
        monkeypatch.setattr(dsa_engine, name, steps)
    graphs = SimpleNamespace(run=bench.eager)
    dsa_engine.check_graphs(bench, graphs, [1, 2], 96)  # type: ignore[arg-type]
    row = dsa_engine.time_step(bench, graphs, 2, 96, rate=1e9)
    assert row.graph_ms > 0
    extra = bench.floor_bytes(2, 96) - bench.floor_bytes(2, 48)
    assert extra == 2 * 48 * 2 * (32 + 8) * 2  # tokens of two sequences, in two layers, in 16 bits


def test_constants_of_the_plan_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_PIECE_KEYS", "PIECE_COST_KEYS", "MOST_ROUNDS"):
        monkeypatch.setattr(tile_plan, name, getattr(tile_plan, name))
    options = Namespace(least_piece=[64, 256], piece_cost=None, rounds=[3])
    cost = tile_plan.PIECE_COST_KEYS
    found = [(tile_plan.LEAST_PIECE_KEYS, tile_plan.MOST_ROUNDS, chosen) for chosen in mla_engine.sweep(options)]
    assert found == [
        (least, 3, {"LEAST_PIECE_KEYS": least, "PIECE_COST_KEYS": cost, "MOST_ROUNDS": 3}) for least in (64, 256)
    ]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("int4", [None, Int4Format("awq", 32)])
def test_dense_benchmark_steps_are_timed(int4: Int4Format | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        engine.QWEN3_8B, vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1
    )
    config = replace(config, int4=int4)
    bench = engine.Engine(replace(config, head_dim=16), kv_tokens=256, page_size=16)
    monkeypatch.setattr(engine, "gpu_ms", lambda _call, _repeats: 2.0)
    executor, graphs = Executor(bench.runner, bench.cache, (), overlap=True), mock.create_autospec(DecodeGraphs)
    result = engine.time_decode(bench, executor, graphs, batch=2, context=40, rate=1e6)
    assert result.step_ms > 0
    weights = engine.step_weight_bytes(bench.parameters.slots(), 1.0)
    assert result.ratio == pytest.approx(2.0 / (1e3 * (weights + 80 * bench.kv_token_bytes) / 1e6))


@pytest.mark.usefixtures("on_cpu")
def test_dense_benchmark_counts_the_experts_that_tokens_choose() -> None:
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    config = engine.published("qwen3-30b-a3b")
    assert config.moe is not None
    moe = replace(config.moe, num_experts=16, experts_per_token=4, expert_size=16)
    bench = engine.Engine(
        replace(config, num_layers=2, mixed=(True, True), moe=moe, **sizes), kv_tokens=64, page_size=16
    )
    pages = bench.pages([40])[0]
    assert bench.chosen_share([SequenceSlice(bench.tokens(1), 0, pages)]) == 4 / 16
    assert 4 / 16 < bench.chosen_share([SequenceSlice(bench.tokens(8), 0, pages)]) <= 1
    slots = bench.parameters.slots()
    experts = sum(slot.nbytes for name, slot in slots.items() if ".experts." in name)
    assert experts == 2 * 16 * 3 * 16 * 32 * 2
    assert engine.step_weight_bytes(slots, 1.0) - engine.step_weight_bytes(slots, 0.25) == 0.75 * experts
    assert bench.prompt_floor_ms(64, 0, 1e30) < engine.Engine.prompt_floor_ms(bench, 128, 0, 1e30)


@pytest.mark.usefixtures("on_cpu")
def test_first_tokens_of_a_sparse_model_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "CACHED", ((3, 40),))
    bench = dsa_engine.Engine(sparse_config(), sequences=1, page_size=8, hot_rows=None)
    found = ttft.measure_loop(bench, [5, 20], chunk=8, rate=1e9, anchors={})
    assert [row["tokens"] for row in found["prompts"]] == [5, 20]
    assert all(row["loop_ms"] > 0 and row["sustained_ms"] > 0 for row in found["prompts"])
    (cached,) = found["cached"]
    assert (cached["tokens"], cached["cached"]) == (3, 40)
    assert cached["loop_ms"] > 0


@pytest.mark.usefixtures("on_cpu")
def test_floor_of_a_sparse_prompt_counts_scores_and_attention() -> None:
    bench = dsa_engine.Engine(sparse_config(), sequences=1, page_size=8, hot_rows=None)
    assert bench.dsa.index_topk == 16
    after_none, after_20, after_40 = (bench.prompt_floor_ms(10, cached, rate=1e30) for cached in (0, 20, 40))
    # 4 indexer heads of 16: 20 tokens further back cost ten queries 20 scores more, in 2 layers
    assert after_40 - after_20 == pytest.approx(1e3 * 2 * 2 * 10 * 20 * 4 * 16 / PRODUCT_RATE)
    assert after_20 - after_none > after_40 - after_20  # fewer than 16 rows were selected


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a CPU only")
@pytest.mark.parametrize("layout", ["tp8", "dp8"])
def test_rank_of_eight_runs_all_parts(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in {"WARM_STEPS": 2, "TIMED_STEPS": 3, "ALL_STEPS": 8}.items():
        monkeypatch.setattr(dsa_engine, name, steps)
    file = tmp_path / "results.json"
    flags = ["--tiny", "--layers", "2", "--batch", "1", "3", "--layout", layout, "--json", str(file)]
    rank_of_eight.main(flags)
    found = json.loads(file.read_text())
    resident, evicting = found["decode"][:2], found["decode"][2:]
    assert [(row["sequences"], row["batch"]) for row in resident] == [("resident", 1), ("resident", 3)]
    assert [(row["sequences"], row["batch"]) for row in evicting] == [("evicting", 1), ("evicting", 3)]
    assert all(row["graph_ms"] > 0 for row in found["decode"])
    assert all(row["miss_share"] == 0 for row in resident)
    assert all(0 < row["miss_share"] < 1 for row in evicting)
    assert found["decode"][1]["floor_ms"] > found["decode"][0]["floor_ms"] > 0
    assert [row["tokens"] for row in found["prefill"]] == [48, 96]
    assert found["memory"]["hisparse"]["host_token_bytes"] > 0 == found["memory"]["plain"]["host_token_bytes"]
    assert rank_of_eight.main([*flags[:-2], "--parts", "memory"]).keys().isdisjoint({"decode", "prefill"})


def test_rank_of_eight_holds_an_eighth_of_what_is_divided() -> None:
    config = rank_of_eight.model_config(3, tiny=True)
    layouts = [one_rank.Layout.of(name, config) for name in ("tp8", "dp8")]
    models = [(config, WHOLE), *((layout.config, layout.shard) for layout in layouts)]
    whole, tp8, dp8 = (
        {name: slot.target.numel() for name, slot in LatentParameters.allocate(model, shard, **META).slots().items()}
        for model, shard in models
    )

    def total(weights: dict[str, int], part: str) -> int:
        return sum(size for name, size in weights.items() if part in name)

    for rank in (tp8, dp8):
        assert 8 * total(rank, ".mlp.experts.") == total(whole, ".mlp.experts.")
        assert 8 * total(rank, ".mlp.shared_experts.") == total(whole, ".mlp.shared_experts.")
        assert 8 * total(rank, ".0.mlp.") == total(whole, ".0.mlp.")
    assert 8 * total(tp8, "q_b_proj") == total(whole, "q_b_proj") == total(dp8, "q_b_proj")
    assert 8 * total(tp8, "lm_head") == total(whole, "lm_head") == total(dp8, "lm_head")
    assert len([name for name in dp8 if "layers.2.mlp.experts." in name]) == 3 * 2  # of 16


def test_mlps_of_data_parallel_ranks_compute_the_rows_of_all() -> None:
    config = rank_of_eight.model_config(2, tiny=True)
    layout = one_rank.Layout.of("dp8", config)
    seen: list[torch.Tensor] = []

    def mlp(rows: torch.Tensor, _parameters: object) -> torch.Tensor:
        seen.append(rows)
        return rows

    rows = torch.randn(3, config.hidden_size)
    decoder_module: Any = latent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_module, "feed_forward", mlp)
        with one_rank.exchanging(layout, CPU):
            result = decoder_module.feed_forward(rows, None)
        assert decoder_module.feed_forward is mlp
    (gathered,) = seen
    assert gathered[:3].equal(rows)
    assert gathered.view(8, 3, -1).sort(dim=-1).values.equal(rows.sort(dim=-1).values.expand(8, 3, -1))
    assert not gathered[3:6].equal(rows)
    torch.testing.assert_close(result, gathered.view(8, 3, -1).sum(dim=0))


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_steps_of_a_rank_of_eight_run_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without experts: the interpreter does not support bfloat16, and in other types their products synchronise."""

    def fill(slots: Mapping[str, Slot], *_: object, row_scaled: bool) -> None:
        del row_scaled
        for slot in slots.values():
            values = torch.randn(slot.target.shape) * slot.shape[-1] ** -0.5
            slot.target.copy_(values if len(slot.shape) > 1 else 1 + values)

    monkeypatch.setattr("pdserve.models.runner.fill_with_noise", fill)  # the simulated GPU has no random generator
    config = rank_of_eight.model_config(1, tiny=True)
    config = replace(config, dtype="float16", mixed=(False,))
    layout = one_rank.Layout.of("dp8", config)
    with PretendGpu() as gpu:
        use_own_stream(DEVICE)
        rank = one_rank.Rank(layout, "auto", DEVICE)
        bench = one_rank.RankEngine(rank, sequences=2, residents=0, max_context=40, page_size=8, hot_rows=24)
        gpu.pin(bench.cache.pools[0].data)
        with torch.inference_mode(), one_rank.exchanging(layout, DEVICE):
            graphs = bench.graphs([2])
            slices = bench.sequences(2, 40, steps=2)
            for _ in range(2):
                logits = graphs.run(slices)
                slices = dsa_engine.following(slices)
        assert isinstance(graphs, StepGraphs)
        assert logits is not None
        assert logits.shape == (2, 320)
        assert logits.to(CPU).isfinite().all()


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_swap_in_benchmark_compares_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import swap_in

    for name, value in {"TOP_K": 8, "PAGE_SIZE": 4, "DEVICE": DEVICE}.items():
        monkeypatch.setattr(swap_in, name, value)
    with PretendGpu():
        use_own_stream(DEVICE)
        pools = swap_in.Pools.allocate(3, 32, hot_rows=16, context=256)
        swap_in.verify(pools)
        pools.host.add_(1)
        trace = swap_in.Trace(pools, 1, 25)
        trace.select()
        trace.swap_in()
        trace.check()
        pools.hot.add_(1)
        with pytest.raises(AssertionError):
            trace.check()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("answers", [grammar.TimedGrammars, grammar.DocumentGrammars])
def test_grammar_benchmark_follows_the_grammar(answers: type[grammar.TimedGrammars]) -> None:
    config = replace(
        engine.QWEN3_8B, vocab_size=640, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1
    )
    bench = engine.Engine(replace(config, head_dim=16), kv_tokens=256, page_size=16)
    compiler = GrammarCompiler(lambda: grammar.made_up_vocabulary(640))
    grammars = answers(compiler, 2, bench.cache.device)  # asserts that no row has a problem
    executor = Executor(bench.runner, bench.cache, (grammar.EOS,), overlap=True, grammars=grammars)
    executor.samples_later = True
    steps = grammar.ANSWER_TOKENS + 30
    timing = grammar.time_steps(bench, executor, 2, 40, steps, True)
    assert timing.mean_ms > 0
    assert len(grammars.seconds) == steps
    assert grammar.time_first_tokens(bench, executor, 20, True) > 0


@pytest.mark.parametrize("rows", [3, 70])
def test_fp8_benchmark_counts_what_is_read_and_multiplied(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(calls: Any) -> float:
        for call in calls:
            assert call().isfinite().all()
        return 2.0

    for name, value in {
        "DEVICE": CPU,
        "time_us": run,
        "READ_BYTES": 1 << 17,
        "HIDDEN": 256,
        "EXPERTS": 16,
        "LINEARS": {"plain": (192, 256, False), "gated": (256, 256, True)},
    }.items():
        monkeypatch.setattr(fp8_linear, name, value)
    rates = fp8_linear.Rates(1e12, 1e12)
    plain, gated = (list(fp8_linear.measure_linear(name, rows, rates)) for name in ("plain", "gated"))
    exact = ["exact*"] if rows == 3 else []
    assert [row.method for row in plain] == [*exact, "triton" if exact else "triton*"]
    assert [row.method for row in gated] == [*exact, "triton" if exact else "triton*", "cublas"]
    assert plain[0].read_us == pytest.approx((192 * 256 + 3 * 4 * 4) / 1e6)
    assert plain[0].product_us == pytest.approx(2 * rows * 192 * 256 / 1e6)
    (*_, other, by_row) = fp8_linear.measure_linear("plain", rows, rates, by_row=True)
    assert (other.method.strip("*"), by_row.method) == ("triton", "rowwise")
    assert by_row.read_us == pytest.approx((192 * 256 + 192 * 4) / 1e6)
    gate_up, down = fp8_linear.draw_weight(2, 256, 256), fp8_linear.draw_weight(2, 256, 128)
    row = fp8_linear.measure_experts("experts", gate_up, down, rows, rates)
    assert 0 < row.product_us <= 2 * rows * 2 * (gate_up.nbytes + down.nbytes) / 1e6
    assert row.share == max(row.read_us, row.product_us) / 2.0


@pytest.mark.parametrize("mxfp4", [False, True])
def test_benchmark_of_packed_experts_counts_what_is_read(monkeypatch: pytest.MonkeyPatch, mxfp4: bool) -> None:
    def run(calls: Any) -> float:
        for call in calls:
            assert call().isfinite().all()
        return 2.0

    small = packed_experts.Mixture(hidden=128, size=128, experts=4, per_token=4, mxfp4=mxfp4)
    for name, value in {"DEVICE": CPU, "time_us": run, "REPEATS": 1, "MIXTURES": {"small": small}}.items():
        monkeypatch.setattr(packed_experts, name, value)
    row = packed_experts.Layer("small", 1e12).measure(3)
    matrices = 4 * 3 * 128 * 128
    # the odd group of 128 columns is padded with another one
    assert row.read_us == pytest.approx((matrices * 17 / 32 if mxfp4 else matrices + matrices * 8 / 128) / 1e6)
    assert row.product_us == pytest.approx(2 * 3 * matrices / PRODUCT_RATE * 1e6)
    assert (row.time_us, row.bfloat16_us, row.expanded_us) == (2.0, 2.0, None)
    assert packed_experts.Layer("small", 1e12).measure(16).expanded_us == 2.0


def test_int4_benchmark_counts_what_is_read_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(calls: Any) -> float:
        for call in calls:
            assert call().isfinite().all()
        return 2.0

    for name, value in {
        "DEVICE": CPU,
        "time_us": run,
        "READ_BYTES": 1 << 15,
        "LINEARS": {"plain": (192, 256, False)},
    }.items():
        monkeypatch.setattr(int4_linear, name, value)
    layer = int4_linear.Layer("plain", 128, 1e12)
    int4_linear.check(layer, 3, None)
    row = layer.measure(3, "expand", Tiles(outputs=64), 1 << 20)
    assert (row.method, row.time_us, row.bfloat16_us) == ("expand*", 2.0, 2.0)
    assert row.read_us == pytest.approx((192 * 128 + 2 * 2 * 2 * 192) / 1e6)
    assert row.product_us == pytest.approx(2 * 3 * 192 * 256 / PRODUCT_RATE * 1e6)
    assert "outputs 64" in str(row)
