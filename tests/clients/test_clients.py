"""LangChain, LiteLLM and LlamaIndex against a real pair.

`make test-clients` installs them and sets PDSERVE_CLIENTS to the interpreter that has them.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.program import CHECKS
from tests.cluster.servers import Server

PYTHON = os.environ.get("PDSERVE_CLIENTS")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="LangChain, LiteLLM and LlamaIndex: make test-clients")


@pytest.mark.parametrize("check", CHECKS)
def test_client(decode: Server, check: str) -> None:
    assert PYTHON is not None
    program = Path(__file__).with_name("program.py")
    done = subprocess.run(
        [PYTHON, program, decode.url, check], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
