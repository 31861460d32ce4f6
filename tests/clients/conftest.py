"""One prefill and one decode server with SmolLM2 for all client tests."""

from collections.abc import Iterator

import pytest

from tests.cluster.servers import Server, cluster


@pytest.fixture(scope="session")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with cluster(tmp_path_factory.mktemp("clients")) as started:
        pool = ("--kv-tokens", "4096")
        prefill, decode = started.pair("smollm2", ("--chunk-size", "64", *pool), pool)
        yield decode
        prefill.check_clean()
        decode.check_clean()
