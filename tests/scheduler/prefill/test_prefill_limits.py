"""Requests that a prefill server refuses: the reason names the field, the limit and the value."""

from typing import Any

import msgspec
import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.protocol.messages import InstanceId, KvDestination, TransferFailed, TransferKey

PEER = InstanceId("decode")
LIMITS = PrefillLimits(page_size=8, chunk_size=16, max_queued_requests=9, context_length=64, vocab_size=100)
SOUND = KvDestination(
    key=TransferKey(1, 1), rid="r", sampling=SamplingParams(max_new_tokens=4), timeout_s=9, prefix_tokens=4
)
PROMPT, INDICES = list(range(12)), [7, 0]


def receive(wanted: KvDestination = SOUND, prompt: list[int] = PROMPT, indices: list[int] = INDICES) -> str | None:
    """Why a server with 7 pages refuses this request of a decode server with 8 pages of 4 tokens, or None."""
    scheduler = PrefillScheduler(LIMITS, PageAllocator[KvPage](7))
    scheduler.peer_up(PEER, PageSpace(num_pages=8, page_size=4))
    scheduler.receive(PrefillRequest(PEER, wanted, prompt, indices, 0.0), 0.0)
    scheduler.check_integrity()
    effects = scheduler.take_effects()
    if not effects:
        assert scheduler.state_counts()["waiting"] == 1
        return None
    (sent,) = effects
    assert isinstance(sent, SendToPeer)
    assert isinstance(sent.message, TransferFailed)
    assert not sent.message.retryable, "a retry would be refused as well"
    assert (scheduler.idle, scheduler.counters["requests_refused"], scheduler.counters["requests"]) == (True, 1, 0)
    return sent.message.reason


def test_valid_request_is_accepted() -> None:
    assert receive() is None
    assert receive(msgspec.structs.replace(SOUND, prefix_tokens=12), indices=[]) is None


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "prompt of 0 tokens is outside [1, 64]"),
        ([1] * 65, "prompt of 65 tokens is outside [1, 64]"),
        ([1] * 57, "prompt of 57 tokens exceeds prefill's KV pool of 56 tokens"),
        ([1, 99, -5, 100], "prompt has token id -5, outside [0, 100)"),
        ([1, 99, 100], "prompt has token id 100, outside [0, 100)"),
    ],
)
def test_invalid_prompt_is_refused(prompt: list[int], reason: str) -> None:
    assert receive(prompt=prompt) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"samples": 0}, "samples 0 is outside [1, 256]"),
        ({"samples": 257}, "samples 257 is outside [1, 256]"),
        ({"output_tokens": 12}, "output_tokens 12 is outside [0, 12)"),
        ({"output_tokens": -1}, "output_tokens -1 is outside [0, 12)"),
        ({"prefix_tokens": 13}, "prefix_tokens 13 is outside [0, 12]"),
        ({"prefix_tokens": -4}, "prefix_tokens -4 is outside [0, 12]"),
        ({"prefix_tokens": 6}, "prefix_tokens 6 is not a multiple of the page size 4"),
        (
            {"sampling": SamplingParams(max_new_tokens=4, stop_token_ids=(3, 200))},
            "stop_token_ids has token id 200, outside [0, 100)",
        ),
        (
            {"sampling": SamplingParams(max_new_tokens=4, logit_bias=((-2, 1.0),))},
            "logit_bias has token id -2, outside [0, 100)",
        ),
    ],
)
def test_invalid_field_is_refused(fields: dict[str, Any], reason: str) -> None:
    assert receive(msgspec.structs.replace(SOUND, **fields)) == reason


@pytest.mark.parametrize(
    ("indices", "granularity", "reason"),
    [
        ([7], "page", "1 destination indices for 2 pages"),
        ([7, 8], "page", "destination index 8 is outside [0, 8)"),
        ([-1, 7], "page", "destination index -1 is outside [0, 8)"),
        ([*range(25, 32), 32], "token", "destination index 32 is outside [0, 32)"),
        ([*range(7)], "token", "7 destination indices for 8 tokens"),
    ],
)
def test_invalid_destination_is_refused(indices: list[int], granularity: str, reason: str) -> None:
    wanted = msgspec.structs.replace(SOUND, granularity=granularity)
    assert receive(wanted, indices=indices) == reason


HISPARSE = PageSpace(num_pages=8, page_size=4, in_host_memory=True, hot_pages=5)


@pytest.mark.parametrize(
    ("space", "enable_hisparse", "hot_indices", "reason"),
    [
        (HISPARSE, True, [], None),
        (HISPARSE, False, [4, 0], None),
        (HISPARSE, False, [4], "1 hot indices for 2 pages"),
        (HISPARSE, False, [4, 5], "hot index 5 is outside [0, 5)"),
        (HISPARSE._replace(hot_pages=0), True, [], None),
        (HISPARSE._replace(hot_pages=0), False, [], None),
        (
            PageSpace(8, 4),
            True,
            [],
            "enable_hisparse is set, but the decode server announced no KV pool in host memory",
        ),
    ],
)
def test_hisparse_destination_is_checked_against_the_announced_pools(
    space: PageSpace, enable_hisparse: bool, hot_indices: list[int], reason: str | None
) -> None:
    scheduler = PrefillScheduler(LIMITS, PageAllocator[KvPage](7))
    scheduler.peer_up(PEER, space)
    wanted = msgspec.structs.replace(SOUND, enable_hisparse=enable_hisparse)
    scheduler.receive(PrefillRequest(PEER, wanted, PROMPT, INDICES, 0.0, hot_indices), 0.0)
    refused = [effect.message for effect in scheduler.take_effects() if isinstance(effect, SendToPeer)]
    assert [message.reason for message in refused if isinstance(message, TransferFailed)] == [reason] * bool(reason)
    paths = [request.path for request in scheduler.requests.values()]
    to_host = enable_hisparse or not space.hot_pages
    assert paths == ([] if reason else ["host" if to_host else "device"])
