"""Properties that depend on several settings."""

import pytest

from pdserve.configs.schema import DecodeConfig


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
