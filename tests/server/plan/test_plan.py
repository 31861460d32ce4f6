"""`pdserve plan`: flags, built-in geometries, and sizes computed from the shapes of a model."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.console import Console

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig
from pdserve.models.loading.catalog import GEOMETRIES, ModelSource, locate_geometry
from pdserve.models.registry import FAMILIES
from pdserve.server.cli import main
from pdserve.server.plan.models import kv_token_bytes, listing, weight_bytes
from pdserve.server.plan.options import GIB, GPU_GIB, Gpus, parse_gpus, parse_tokens
from pdserve.server.plan.sizes import Sizes, plan_sizes

CONTEXT = 32768


def sizes(
    model: str,
    *,
    gib: float = 10_000.0,
    context: int = CONTEXT,
    fp8: bool = False,
    enable_hisparse: bool = False,
    **settings: Any,
) -> Sizes:
    (found,) = plan_sizes(
        DecodeConfig(model=model, page_size=64, **settings),
        locate_geometry(model),
        context=context,
        device_bytes=int(gib * GIB),
        fp8=fp8,
        hisparse=enable_hisparse,
    )
    return found


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", "--json", *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("8xH200", Gpus(8, "H200", GPU_GIB["H200"])),
        ("2 x h100", Gpus(2, "H100", GPU_GIB["H100"])),
        ("B200", Gpus(1, "B200", GPU_GIB["B200"])),
        ("4x80GiB", Gpus(4, "80GiB", 80.0)),
        ("1x80GB", Gpus(1, "80GB", 80e9 / GIB)),
    ],
)
def test_gpus_are_parsed(text: str, gpus: Gpus) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["8xH300", "0xH200", "", "8x", "eight"])
def test_unknown_gpus_are_refused_with_the_known_names(text: str) -> None:
    with pytest.raises(StartupError, match=r"--gpus .*H200"):
        parse_gpus(text)


def test_contexts_are_parsed() -> None:
    assert [parse_tokens(text) for text in ("100", "64k", "1M")] == [100, 65536, 1 << 20]
    for text in ("0", "-1", "64kb", ""):
        with pytest.raises(StartupError, match="--context"):
            parse_tokens(text)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("deepseek-r1", transformers.DeepseekV3Config(max_position_embeddings=163840)),
        ("deepseek-v3.2", transformers.DeepseekV32Config()),
        ("glm-5", transformers.GlmMoeDsaConfig()),
    ],
)
def test_latent_geometries_equal_the_defaults_of_transformers(
    name: str, reference: transformers.PretrainedConfig
) -> None:
    raw = json.loads((GEOMETRIES / f"{name}.json").read_text())
    expected = reference.to_dict()
    shared = raw.keys() & expected.keys() - {"torch_dtype", "dtype", "architectures", "rope_scaling"}
    assert len(shared) > 20
    assert {key: raw[key] for key in shared} == {key: expected[key] for key in shared}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-r1", 671),
        ("deepseek-v3.2", 671),
        ("kimi-k2", 1026),
        ("glm-5", 744),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
    ],
)
def test_geometries_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    """Weights are in bfloat16, except for a few float32 matrices (router, indexer weights)."""
    found = sizes(name, gib=1.0, context=1024).weight_bytes / 2 / 1e9
    assert found == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-v3.2", "glm-5", "kimi-k2", "qwen3-8b"])
def test_listed_memory_equals_that_of_a_plan(name: str) -> None:
    """`pdserve models` computes it without torch."""
    config = locate_geometry(name).config
    planned = sizes(name, gib=1.0, context=1024)
    assert config.parameters == pytest.approx(planned.weight_bytes / 2, rel=0.005)
    share = weight_bytes(config) / planned.weight_bytes
    assert 0.5 < share < 0.52 if config.mla is not None else share == pytest.approx(1, rel=0.001)
    # the listing has index keys in fp8 (132 bytes with the scale), the plan in bfloat16 (256 bytes)
    saved = 61 * (256 - 132) if name == "deepseek-v3.2" else 78 * (256 - 132) if name == "glm-5" else 0
    assert kv_token_bytes(config) == planned.device_token_bytes - saved


def test_models_are_listed_with_families_and_memory() -> None:
    out = io.StringIO()
    Console(width=80, file=out).print(listing())
    text = out.getvalue()
    families = [name for family in FAMILIES for name in (family.name, family.architecture)]
    for name in (*families, "smollm2 (embedded)", "deepseek-v3.2", "glm-5"):
        assert name in text
    (row,) = [line for line in text.splitlines() if line.startswith("qwen3-8b")]
    assert row.split() == ["qwen3-8b", "qwen3", "8.2", "B", "15.3", "GiB", "141", "MiB", "40,960"]


def test_weights_stay_in_fp8_where_the_gpu_has_it() -> None:
    """All weights except for the embedding, the LM head, the router and kv_b_proj."""
    expanded, kept = (
        sizes("deepseek-v3.2", gib=1.0, context=1024, tp=8, fp8=fp8).weight_bytes for fp8 in (False, True)
    )
    assert 0.5 < kept / expanded < 0.52


def test_kv_of_a_token_follows_from_the_geometry() -> None:
    dense = sizes("qwen3-8b", tp=4)
    assert dense.device_token_bytes == 2 * 36 * 2 * 128 * 2  # keys and values of 2 heads in 36 layers, bfloat16
    on_gpu = sizes("deepseek-v3.2", tp=8)
    assert (on_gpu.device_token_bytes, on_gpu.host_token_bytes) == (61 * (576 + 128) * 2, 0)
    hisparse = sizes("deepseek-v3.2", tp=8, enable_hisparse=True, kv_dtype="fp8_e4m3")
    assert (hisparse.device_token_bytes, hisparse.host_token_bytes) == (61 * 128 * 2, 61 * (512 + 4 * 4 + 64 * 2))


def test_requests_fill_the_memory() -> None:
    """Weights and KV of all requests fit into the budget, and those of one more do not."""
    whole = sizes("qwen3-32b", gib=139.8)
    budget = 0.9 * (139.8 * GIB - whole.weight_bytes)
    assert whole.limit == "GPU memory"
    assert whole.requests * whole.device_request_bytes <= budget < (whole.requests + 1) * whole.device_request_bytes
    assert whole.device_request_bytes == CONTEXT * whole.device_token_bytes


def test_hisparse_fits_more_requests_with_their_keys_and_hot_buffers() -> None:
    settings: dict[str, Any] = {"gib": 140.0, "tp": 16}
    plain, hisparse = (sizes("deepseek-v3.2", enable_hisparse=on, **settings) for on in (False, True))
    assert hisparse.requests > 2 * plain.requests > 0
    budget = 0.9 * (140 * GIB - hisparse.weight_bytes)
    # tables are outside the share of free memory
    assert hisparse.requests * hisparse.device_request_bytes <= 1.1 * budget
    assert (hisparse.requests + 1) * hisparse.device_request_bytes > 0.95 * budget
    assert hisparse.own_hot_pages >= hisparse.requests * (3072 // 64 + 1)
    assert hisparse.host_request_bytes == hisparse.requests * CONTEXT * hisparse.host_token_bytes


def test_each_request_of_a_short_context_has_a_whole_hot_buffer() -> None:
    """Then hot buffers, and not keys, limit the number of requests."""
    found = sizes("deepseek-v3.2", enable_hisparse=True, gib=140.0, tp=16, context=2048)
    assert found.limit == "GPU memory"
    assert found.requests == found.own_hot_pages // (3072 // 64 + 1)


def test_data_parallel_ranks_hold_whole_attention_and_requests_of_their_own() -> None:
    settings: dict[str, Any] = {"gib": 140.0, "tp": 8, "fp8": True, "enable_hisparse": True}
    shared, own = (sizes("deepseek-v3.2", dp_attention=on, **settings) for on in (False, True))
    assert own.weight_bytes > shared.weight_bytes
    assert own.device_token_bytes == shared.device_token_bytes
    assert (shared.requests, own.requests) == (shared.requests_per_rank, 8 * own.requests_per_rank)
    assert own.requests > 4 * shared.requests
    assert own.host_request_bytes == own.requests_per_rank * CONTEXT * own.host_token_bytes


def test_sizes_are_those_of_the_largest_pipeline_stage() -> None:
    one, two = (sizes("deepseek-v3.2", tp=8, pp=pp) for pp in (1, 2))
    assert two.device_token_bytes == 31 * (576 + 128) * 2
    assert 0.5 * one.weight_bytes < two.weight_bytes < 0.55 * one.weight_bytes


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"gib": 100.0}, "weights"),
        ({"gib": 200.0, "host_memory_gib": 8}, "host memory"),
        ({"gib": 200.0, "max_running_requests": 2}, "max_running_requests"),
        ({"gib": 200.0}, "GPU memory"),
    ],
)
def test_plan_names_what_limits_the_requests(settings: dict[str, Any], limit: str) -> None:
    found = sizes("deepseek-v3.2", tp=8, enable_hisparse=True, **settings)
    assert found.limit == limit
    assert (found.requests == 0) == (limit == "weights")


def test_plan_for_all_gpus_is_printed_with_and_without_hisparse(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "deepseek-v3.2", "--gpus", "16xH200", "--context", "32k", "--page-size", "64")
    document = plan(capsys, *flags)
    assert (document["tp"], document["pp"], document["servers"], document["context"]) == (16, 1, 1, CONTEXT)
    assert [one["hisparse"] for one in document["sizes"]] == [False, True]
    reserve = 4.0
    expected = [
        asdict(sizes("deepseek-v3.2", gib=GPU_GIB["H200"] - reserve, tp=16, fp8=True, enable_hisparse=on))
        for on in (False, True)
    ]
    assert document["sizes"] == expected
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    assert f"--enable-hisparse --max-running-requests {expected[1]['requests']}" in text
    assert f"{expected[1]['host_token_bytes']:,} B" in text


def test_plan_of_a_dense_model_has_no_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-8b", "--gpus", "1xH100", "--context", "8k"]) == 0
    text = capsys.readouterr().out
    assert "settings: --max-running-requests 47" in text
    assert "host memory" not in text
    assert "HiSparse" not in text


def test_requests_are_as_long_as_the_model_supports_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--model", "qwen3-8b", "--gpus", "1xH100")["context"] == 40960


def test_several_servers_share_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, "--model", "qwen3-8b", "--tp", "2", "--context", "8k")
    assert (document["tp"], document["servers"], len(document["sizes"])) == (2, 4, 1)


@pytest.mark.parametrize(
    ("model", "gpus", "tp", "servers"),
    [
        ("smollm2", "8xH200", 1, 8),
        ("smollm2", "6xH200", 3, 2),
        ("qwen3-8b", "6xH200", 2, 3),
        ("qwen3-8b", "3xH200", 1, 3),
    ],
)
def test_tp_is_the_largest_that_the_model_allows_and_that_divides_the_gpus(
    model: str, gpus: str, tp: int, servers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, "--model", model, "--gpus", gpus, "--context", "1k")
    assert (document["tp"], document["servers"]) == (tp, servers)


def test_plan_without_flags_is_for_the_embedded_model_and_names_the_assumed_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("smollm2 (llama), tp 1, pp 1, on 1 of 8 x H200")
    assert "--gpus was not given: 8xH200 are assumed" in text
    assert main(["plan", "--gpus", "8xH200"]) == 0
    assert "assumed" not in capsys.readouterr().out


def test_smaller_kv_is_not_the_advice_if_the_weights_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-32b", "--gpus", "1xL40S"]) == 0
    text = capsys.readouterr().out
    assert "no request fits: use more or larger GPUs, another --tp or --pp\n" in text + "\n"
    assert "fp8" not in text
    assert main(["plan", "--model", "qwen3-8b", "--gpus", "1x20GiB"]) == 0
    assert "or --kv-dtype fp8_e4m3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "qwen3-8b", "--context", "64k"), "more than the 40960 tokens of qwen3-8b"),
        (("--model", "qwen3-8b", "--enable-hisparse", "--context", "1k"), "needs a model with sparse attention"),
        (
            ("--model", "qwen4"),
            "deepseek-r1, deepseek-v3.2, glm-5, kimi-k2, qwen3-235b-a22b, qwen3-30b-a3b, qwen3-32b, qwen3-8b",
        ),
        (("--model", "qwen3-8b", "--tp", "16"), "tp x pp = 16 ranks need as many GPUs"),
        (
            ("--model", "qwen3-8b", "--gpus", "3xH200", "--tp", "3", "--context", "1k"),
            "tp = 3 does not divide num_attention_heads = 32: --tp may be 1, 2",
        ),
        (("--model", "qwen3-8b", "--rate", "4"), "--rate is for a load: give --input-len N or --trace FILE, too"),
        (("--slo-ttft-ms", "500"), "--slo-ttft-ms is for a load: give --input-len N"),
        (("--ratios", "2:1"), "--ratios is for a load: give --input-len N"),
        (("--prefix-len", "64"), "--prefix-len is for a load: give --input-len N"),
        (
            ("--gpus", "8xH200", "--input-len", "64", "--rate", "4", "--slo-ttft-ms", "500"),
            "--gpus is for sizes: step times of a load are measured",
        ),
        (("--model", "qwen3-8b", "--reserve-gib", "-1"), "--reserve-gib must be at least 0, got '-1'"),
    ],
)
def test_impossible_plans_are_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    assert said in capsys.readouterr().err


def test_models_are_found_by_their_configuration_alone(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text((GEOMETRIES / "qwen3-8b.json").read_text())
    by_name = locate_geometry("qwen3-8b")
    for spec in (directory, directory / "config.json"):
        found = locate_geometry(str(spec))
        assert found == ModelSource("my-model", directory / "config.json", "huggingface", by_name.config)
