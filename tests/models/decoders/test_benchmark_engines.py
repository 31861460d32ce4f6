"""GPU benchmarks that use the classes of the engine, not a server, still run: a few steps of each, on the CPU."""

import json
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
    grammar,
    mla_engine,
    rank_of_eight,
)
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.models.config.model import ModelConfig
from pdserve.models.grammar.compiler import GrammarCompiler
from pdserve.models.graphs.capture import DecodeGraphs
from pdserve.models.weights.schemes import Nvfp4Scheme, Packed4Scheme, Scheme
from pdserve.scheduler.ranks.executor import Executor
from tests.kernels.interpreter import INTERPRETED
from tests.models.pretend_gpu import DEVICE, PretendGpu

CPU = torch.device("cpu")


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


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("scheme", [None, Packed4Scheme("awq", 32), Nvfp4Scheme("modelopt")])
def test_dense_benchmark_steps_are_timed(scheme: Scheme | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        engine.QWEN3_8B, vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1
    )
    config = replace(config, scheme=scheme)
    bench = engine.Engine(replace(config, head_dim=16), kv_tokens=256, page_size=16)
    monkeypatch.setattr(engine, "gpu_ms", lambda _call, _repeats: 2.0)
    executor, graphs = Executor(bench.runner, bench.cache, (), overlap=True), mock.create_autospec(DecodeGraphs)
    result = engine.time_decode(bench, executor, graphs, batch=2, context=40, rate=1e6)
    assert result.step_ms > 0
    weights = engine.step_weight_bytes(bench.parameters.slots(), 1.0)
    assert result.ratio == pytest.approx(2.0 / (1e3 * (weights + 80 * bench.kv_token_bytes) / 1e6))


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a CPU only")
def test_rank_of_eight_times_a_mixture_with_kv_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in {"WARM_STEPS": 2, "TIMED_STEPS": 3, "ALL_STEPS": 8}.items():
        monkeypatch.setattr(dsa_engine, name, steps)
    found, file = {}, tmp_path / "results.json"
    for layout in ("tp8", "dp8"):
        flags = ["--geometry", "qwen3-235b-a22b", "--tiny", "--layers", "2", "--batch", "1", "3", "--layout", layout]
        rank_of_eight.main([*flags, "--json", str(file)])
        found[layout] = json.loads(file.read_text())
        assert [(row["sequences"], row["batch"]) for row in found[layout]["decode"]] == [
            ("resident", 1),
            ("resident", 3),
        ]
        assert all(row["graph_ms"] > 0 == row["miss_share"] for row in found[layout]["decode"])
        assert [row["tokens"] for row in found[layout]["prefill"]] == [48, 96]
        assert "hisparse" not in found[layout]["memory"]
    one_head = 2 * 2 * 16 * 4  # bytes of a token: keys and values of two layers, in float32
    for layout, heads in {"tp8": 1, "dp8": 4}.items():
        first, second = (row["floor_ms"] * rank_of_eight.NOMINAL_RATE / 1e3 for row in found[layout]["decode"])
        assert found[layout]["memory"]["plain"]["device_token_bytes"] == heads * one_head
        assert first > 160 * heads * one_head
        assert second - first > 2 * 160 * heads * one_head
    row_bytes = 64 * 4
    # two all-reduces of three rows, or three rows to seven ranks and their results back
    assert found["tp8"]["decode"][1]["exchange_layer_bytes"] == pytest.approx(2 * 2 * 7 / 8 * 3 * row_bytes)
    assert found["dp8"]["decode"][1]["exchange_layer_bytes"] == 2 * 7 * 3 * row_bytes
    assert found["dp8"]["prefill"][1]["exchange_ms"] == pytest.approx(2 * 2 * 7 * 96 * row_bytes / 350e9 * 1e3)


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
