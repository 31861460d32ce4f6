"""Properties of a configuration that are computed from its settings."""

import pytest
from pydantic import SecretStr

from pdserve.configs.schema import DecodeConfig, PrefillConfig


@pytest.mark.parametrize(
    ("device", "ranks", "shared"),
    [
        ("cuda:0", {"tp": 2}, True),
        ("cuda:1", {"pp": 2}, True),
        ("cuda:0", {}, False),
        ("cuda", {"tp": 2}, False),
        ("auto", {"tp": 2}, False),
        ("cpu", {"tp": 2}, False),
        ("cuda:0", {"tp": 2, "nnodes": 2}, False),
        ("cuda:0", {"tp": 4, "nnodes": 2}, True),
    ],
)
def test_local_ranks_share_a_named_gpu(device: str, ranks: dict[str, int], shared: bool) -> None:
    machines = {"dist_init_addr": "10.0.0.1:9000", "cluster_key": "x" * 16}
    config = DecodeConfig.model_validate({"device": device, **ranks, **machines})
    assert config.ranks_share_gpu == shared


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("a.example", "a.example")])
def test_ipv6_address_is_in_brackets_in_urls(host: str, shown: str) -> None:
    assert PrefillConfig(host=host, cluster_key=SecretStr("x" * 16)).url_host == shown
