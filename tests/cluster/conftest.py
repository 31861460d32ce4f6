"""Fixtures for tests that run real servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.servers import Cluster, cluster


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 4,096 tokens."""
    pytest.importorskip("transformers", reason="needs transformers: it is not installed")
    from tests.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=4096)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as started:
        yield started
