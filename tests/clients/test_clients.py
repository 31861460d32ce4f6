"""LangChain, LiteLLM and LlamaIndex against a real pair.

`make test-clients` installs them and sets PDSERVE_CLIENTS to the interpreter that has them.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.program import CHECKS
from tests.cluster.servers import Server, cluster

PYTHON = os.environ.get("PDSERVE_CLIENTS")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="LangChain, LiteLLM and LlamaIndex: make test-clients")


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with cluster(tmp_path_factory.mktemp("clients")) as started:
        pool = ("--kv-tokens", "4096")
        prefill, decode = started.pair("smollm2", ("--chunk-size", "64", *pool), pool)
        yield decode
        prefill.check_clean()
        decode.check_clean()


@pytest.mark.parametrize("check", CHECKS)
def test_client(decode: Server, check: str) -> None:
    assert PYTHON is not None
    program = Path(__file__).with_name("program.py")
    done = subprocess.run(
        [PYTHON, program, decode.url, check], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
