"""`pdserve plan` measures step times of a running pair and predicts goodput from them."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from pdserve.server.cli import main
from pdserve.server.plan.ratio.interference import measure_interference
from pdserve.server.plan.ratio.pair import read_pair
from tests.cluster.servers import Cluster


def test_plan_measures_a_running_pair(
    servers: Cluster, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = ("--kv-tokens", "2048", "--max-running-requests", "4", "--local-prefill", "never")
    prefill, decode = servers.pair(llama, ("--kv-tokens", "2048", "--chunk-size", "128"), pool)
    rates = tmp_path / "rates.json"
    load = ["--input-len", "32", "--output-len", "8", "--rate", "5", "--requests", "10", "--slo-ttft", "60000"]
    urls = ["--url", decode.url, "--prefill-url", prefill.url]
    assert main(["plan", "--json", *load, *urls, "--save-rates", str(rates)]) == 0
    document = json.loads(capsys.readouterr().out)
    pair = read_pair(rates)
    assert [size for size, _ in pair.times.decode_steps] == [1, 2, 4]
    assert pair.times.prefill_s([(0, 128)]) > 0
    assert pair.times.decode_s([32]) > 0
    assert pair.prefill.settings["chunk_size"] == 128
    assert pair.decode.settings["max_running_requests"] == 4
    assert document["best"] == "1P:1D"
    assert all(row["goodput"]["share"] == 1 for row in document["ratios"])

    assert main(["plan", "--json", *load, "--rates", str(rates)]) == 0
    assert json.loads(capsys.readouterr().out) == document

    assert main(["plan", *load, "--url", decode.url, "--prefill-url", decode.url]) == 2
    assert f"{decode.url} is not a prefill server" in capsys.readouterr().err

    alone = msgspec.structs.replace(pair, machine_cores=2)
    shared = asyncio.run(measure_interference(alone, (decode.url,), Console(quiet=True)))
    (together,) = shared.times.interference
    assert (together.prefills, together.decodes) == (1, 1)
    assert min(together.prefill, together.decode) >= 1
