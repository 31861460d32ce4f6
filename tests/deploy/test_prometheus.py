"""`make test-prometheus`: a real Prometheus scrapes a real pair under load. Rules evaluate, and panels have data."""

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.checkpoints import make_dsa_checkpoint
from tests.cluster.servers import HTTP, Server, cluster, wait_until
from tests.deploy.queries import FOLDER, Query, panel_queries
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not os.environ.get("PDSERVE_PROMETHEUS"), reason="needs Debian's package prometheus: make test-prometheus"
)

HISPARSE = (
    "--enable-hisparse",
    *("--page-size", "8", "--hot-rows", "16", "--kv-tokens", "1024", "--host-memory-gib", "0.5"),
    *("--kv-memory-gib", "0.000673"),
)
"""The memory holds the index of 1,024 tokens (128 pages of 4 KiB) and 24 hot pages of 8 KiB: too few for all rows of
two long prompts."""
LOAD_S = 20


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


class Prometheus:
    """A Prometheus server with the configuration of deploy/observability, but other targets and a short interval."""

    def __init__(self, directory: Path, servers: list[Server]) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}" for server in servers]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(FOLDER / "alerts.yml", directory)
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    # Any: JSON of a foreign schema
    def get(self, path: str, **parameters: str) -> Any:
        response = HTTP.get(f"{self._url}{path}", params=parameters, timeout=10)
        response.raise_for_status()
        return response.json()["data"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def ready(self) -> bool:
        try:
            return HTTP.get(f"{self._url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    model = make_dsa_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v32", index_topk=16, index_head_dim=32)
    directory = tmp_path_factory.mktemp("prometheus")
    with cluster(directory) as servers:
        prefill = servers.add("prefill", model, "--page-size", "16", "--chunk-size", "48", "--kv-tokens", "8192")
        decode = servers.add("decode", model, "--prefill", prefill.endpoint, *HISPARSE).wait_ready(peers=1)
        scraper = Prometheus(directory, [prefill, decode])
        try:
            wait_until(scraper.ready, 30, "Prometheus is ready")
            send_load(decode)
            yield scraper
        finally:
            scraper.close()


def send_load(decode: Server) -> None:
    ends_at = time.monotonic() + LOAD_S

    def send(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < ends_at:
            decode.generate(draw.choices(range(256), k=draw.choice((60, 200, 300))), 16)

    HTTP.post(f"{decode.url}/generate", json={}, timeout=5)
    senders = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def test_all_targets_are_scraped(prometheus: Prometheus) -> None:
    targets = prometheus.get("/api/v1/targets")["activeTargets"]
    assert [target["health"] for target in targets] == ["up", "up"], targets


def test_all_rules_evaluate_and_no_alert_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("/api/v1/rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}, group
    assert [rule["name"] for rule in group["rules"] if rule["alerts"]] == []


@pytest.mark.parametrize("query", panel_queries(rate_interval="30s"), ids=lambda query: query.where)
def test_every_panel_has_data(prometheus: Prometheus, query: Query) -> None:
    result = prometheus.get("/api/v1/query", query=query.promql)["result"]
    values = [float(series["value"][1]) for series in result]
    assert values, f"{query.where} has no series: {query.promql}"
    assert any(value == value for value in values), f"{query.where} has no value: {result}"  # NaN differs from itself
