"""Prompts that a decode server computes: the size of its steps."""

import pytest

from pdserve.scheduler.decode.dispatch.local_prefill import LocalLimits, LocalPrefill
from pdserve.scheduler.rates import Rates


@pytest.mark.parametrize(("batch", "tokens"), [(0, 2048), (64, 1984), (2040, 16), (4096, 16)])
def test_a_step_has_room_for_running_requests_and_at_least_a_page(batch: int, tokens: int) -> None:
    local = LocalPrefill(LocalLimits(page_size=16, max_step_tokens=2048), Rates())
    assert local.budget(batch, running=batch, waiting=64) == tokens


@pytest.mark.parametrize(("batch", "tokens"), [(1, 399), (60, 452), (120, 400)])
def test_a_step_has_a_multiple_of_128_tokens(batch: int, tokens: int) -> None:
    local = LocalPrefill(LocalLimits(page_size=1, max_step_tokens=tokens + batch + 100), Rates())
    assert local.budget(batch, running=batch, waiting=64) + batch == (tokens + batch + 100) // 128 * 128
