"""SGLang's test kits against a real pair, as far as they need only a URL. tests/cluster/test_structured_output.py has a
part of them in every run.
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
