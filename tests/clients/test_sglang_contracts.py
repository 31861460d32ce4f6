"""The checks of SGLang's test kits that need only a URL, against a real pair. tests/cluster/test_structured_output.py
runs some of them in `make test`.
"""

import os
from collections.abc import Callable

import pytest

from tests.clients.sglang_contracts import CONTRACTS
from tests.cluster.servers import Server

pytestmark = pytest.mark.skipif("PDSERVE_CLIENTS" not in os.environ, reason="takes minutes: make test-clients")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract(decode: Server, contract: Callable[[str], None]) -> None:
    contract(decode.url)
