"""Fixtures of the HTTP tests: a decode and a prefill server with a scripted leader."""

from collections.abc import AsyncIterator

import pytest

from pdserve.configs.schema import PrefillConfig
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, load_byte_tokenizer, running_server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
async def decode(tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    async with running_server(tokenizer) as server:
        yield server


@pytest.fixture
async def prefill(tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    async with running_server(tokenizer, PrefillConfig()) as server:
        yield server
