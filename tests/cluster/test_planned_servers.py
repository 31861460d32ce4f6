"""`pdserve plan` prints exactly the bytes that servers allocate."""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdserve.server.cli import main
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint
from tests.cluster.servers import cluster

CONTEXT = 200


class Case(NamedTuple):
    model: str
    flags: tuple[str, ...]


HISPARSE = ("--enable-hisparse", "--hot-rows", "16", "--page-size", "8", "--max-running-requests", "5")
CASES = {
    "dense": Case("qwen3", ("--kv-memory-gib", "0.01", "--max-running-requests", "4")),
    "dense-tp2": Case("qwen3", ("--tp", "2", "--page-size", "8", "--kv-tokens", "4001", "--max-running-requests", "4")),
    "sparse": Case("deepseek_v32", ("--kv-memory-gib", "0.004", "--kv-dtype", "fp8_e4m3", "--page-size", "8")),
    "sparse-dp2": Case("deepseek_v32", ("--tp", "2", "--dp-attention", "--page-size", "8", "--kv-tokens", "2000")),
    "hisparse": Case("deepseek_v32", (*HISPARSE, "--kv-memory-gib", "0.002", "--host-memory-gib", "0.005")),
    # two layers of the second stage share an indexer
    "hisparse-pp2": Case("glm_moe_dsa", (*HISPARSE, "--pp", "2", "--kv-tokens", "1024", "--kv-memory-gib", "0.001")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def directory(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return {
        "qwen3": make_checkpoint(directory("qwen3"), "qwen3"),
        "deepseek_v32": make_dsa_checkpoint(directory("deepseek"), "deepseek_v32", index_topk=16),
        "glm_moe_dsa": make_dsa_checkpoint(
            directory("glm"), "glm_moe_dsa", index_topk=16, num_hidden_layers=4, index_topk_pattern="FFFS"
        ),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plan_equals_the_allocations_of_a_server(
    case: Case, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(models[case.model])
    given = dict(itertools.pairwise(case.flags))
    ranks = int(given.get("--tp", "1")) * int(given.get("--pp", "1"))
    layout = () if ranks > 1 else ("--tp", "1")
    # servers on a CPU use float32 and keep no memory for steps; with the explicit sizes, free memory does not matter
    planned = ("--gpus", f"{ranks}x64GiB", "--dtype", "float32", "--reserve-gib", "0", "--context", str(CONTEXT))
    hisparse = () if "--enable-hisparse" in case.flags else ("--no-enable-hisparse",)
    assert main(["plan", "--json", "--model", model, *planned, *layout, *hisparse, *case.flags]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["sizes"]

    with cluster(tmp_path) as servers:
        info: dict[str, Any] = servers.add("decode", model, "--device", "cpu", *case.flags).wait_ready().info()
    of_ranks = info["ranks"]
    assert len(of_ranks) == ranks
    for name in ("weight_bytes", "device_kv_bytes", "host_kv_bytes"):
        assert plan[name] == max(rank[name] for rank in of_ranks), name
    tokens = info["pool"]["tokens"]
    assert plan["num_pages"] == info["pool"]["num_pages"]
    if plan["hisparse"]:
        assert plan["own_hot_pages"] == info["gauges"]["hot_pages"]
        assert plan["max_running_requests"] == info["config"]["max_running_requests"]
        assert tokens * plan["host_token_bytes"] == max(rank["host_kv_bytes"] for rank in of_ranks)
        assert tokens * plan["device_token_bytes"] < max(rank["device_kv_bytes"] for rank in of_ranks)
    else:
        assert tokens * plan["device_token_bytes"] == max(rank["device_kv_bytes"] for rank in of_ranks)
    assert 0 < plan["requests_per_rank"] <= tokens // CONTEXT
    assert plan["requests"] == plan["requests_per_rank"] * info["dp_size"]
