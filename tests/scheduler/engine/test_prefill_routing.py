"""Data-parallel ranks of a prefill server: which rank computes a prompt and gets later messages about it."""

import time
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.engine.prefill_engine import PrefillEngine
from pdserve.scheduler.engine.routing import PrefillRouter, choose_for_prompt
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import FlushCache
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.control.events import LoadReported, MessageReceived, PeerLost
from pdserve.transfer.plan.staged_regions import StagedRegion
from pdserve.transfer.protocol.messages import (
    Abort,
    InstanceId,
    KvDestination,
    Load,
    StageGrant,
    StageRequest,
    TransferKey,
)
from tests.scheduler.simulation.staged_simulator import REGIONS

DECODE = InstanceId("decode")
PAGE = 4


def schedulers(count: int, staged: Sequence[StagedRegion] = ()) -> list[PrefillScheduler]:
    limits = PrefillLimits(page_size=PAGE, chunk_size=64, max_queued_requests=100, context_length=1000, vocab_size=1000)
    found = [PrefillScheduler(limits, PageAllocator[KvPage](100)) for _ in range(count)]
    for scheduler in found:
        scheduler.peer_up(DECODE, PageSpace(100, PAGE), staged)
    return found


def destination(number: int) -> KvDestination:
    return KvDestination(TransferKey(number, 1), f"r{number}", SamplingParams(), timeout_s=60.0)


def give(scheduler: PrefillScheduler, number: int, prompt: list[int]) -> None:
    scheduler.receive(
        PrefillRequest(DECODE, destination(number), prompt, list(range(len(prompt) // PAGE + 1)), 0.0), 0.0
    )
    scheduler.advance(0.0)


def test_prompt_goes_to_the_rank_with_the_fewest_tokens_to_compute() -> None:
    ranks = schedulers(3)
    for number, tokens in enumerate((40, 10, 30)):
        give(ranks[number], number, [number] * tokens)
    assert choose_for_prompt(ranks, [7] * 20) == 1
    give(ranks[1], 9, [7] * 25)
    assert choose_for_prompt(ranks, [7] * 20) == 2


def test_prompts_that_wait_for_their_grammar_count() -> None:
    ranks = schedulers(2)
    engines = [PrefillEngine(one, Mock(size=1), control=Mock(), welcome=Mock()) for one in ranks]
    router = PrefillRouter(ranks)
    sampling = SamplingParams(grammar=Grammar("regex", "a+"))
    numbers = []
    for at in range(4):
        wanted = KvDestination(TransferKey(at, 1), f"r{at}", sampling, timeout_s=60.0)
        message = MessageReceived(DECODE, wanted, (np.full(20, at, dtype=np.int32), np.arange(5, dtype=np.int32)))
        (number,) = router.route(message)
        engines[number].handle(message, 0.0)
        numbers.append(number)
    assert numbers == [0, 1, 0, 1]
    assert [scheduler.state_counts()["compiling"] for scheduler in ranks] == [2, 2]
    (holder,) = router.route(MessageReceived(DECODE, Abort(TransferKey(1, 1), "gone"), ()))
    assert holder == 1


def test_cached_prefix_counts_as_computed() -> None:
    ranks = schedulers(2)
    prompt = list(range(40))
    grant = ranks[1].allocator.grant("cached", 10)
    assert grant is not None
    ranks[1].cache.insert(prompt, grant.pages)
    ranks[1].allocator.release(grant)
    give(ranks[1], 1, [5] * 30)
    assert choose_for_prompt(ranks, prompt) == 1, "36 of 40 tokens are cached, and 30 wait"
    give(ranks[1], 2, [6] * 10)
    assert choose_for_prompt(ranks, prompt) == 0


def test_choice_for_a_long_prompt_takes_less_time_than_a_list_of_its_tokens() -> None:
    """The loop routes it, and other requests wait meanwhile."""
    router = PrefillRouter(schedulers(2))
    prompt, indices = np.arange(1 << 20, dtype=np.int32), np.zeros(1 << 18, dtype=np.int32)
    message = MessageReceived(DECODE, destination(1), (prompt, indices))
    listed_s: list[float] = []
    routed_s: list[float] = []
    for _ in range(5):
        listed_s.append(-time.thread_time())
        prompt.tolist()
        listed_s[-1] += time.thread_time()
        routed_s.append(-time.thread_time())
        assert list(router.route(message)) == [0]
        routed_s[-1] += time.thread_time()
    assert min(routed_s) < min(listed_s)


def test_messages_go_to_the_rank_of_their_transfer_and_events_of_peers_to_all_ranks() -> None:
    ranks = schedulers(3)
    router = PrefillRouter(ranks)
    give(ranks[2], 5, [1] * 10)
    prompt = np.zeros(10, dtype=np.int32)
    assert list(router.route(MessageReceived(DECODE, destination(5), (prompt, prompt)))) == [2], "sent again"
    assert list(router.route(MessageReceived(DECODE, destination(6), (prompt, prompt)))) == [0]
    assert list(router.route(MessageReceived(DECODE, Abort(TransferKey(5, 1), "gone"), ()))) == [2]
    unknown = router.route(MessageReceived(DECODE, Abort(TransferKey(6, 1), "gone"), ()))
    assert list(unknown) == [0], "one answer is enough"
    for event in (PeerLost(DECODE, "silent"), LoadReported(DECODE, Load()), FlushCache()):
        assert list(router.route(event)) == [0, 1, 2]


def test_grants_of_staged_parts_go_to_the_rank_that_sends_them() -> None:
    ranks = schedulers(3, REGIONS)
    router = PrefillRouter(ranks)
    give(ranks[2], 5, [1] * 10)
    assert ranks[2].next_step(0.0) is not None
    sent = [effect.message for effect in ranks[2].take_effects() if isinstance(effect, SendToPeer)]
    parts = [message.part for message in sent if isinstance(message, StageRequest)]
    assert parts
    for part in parts:
        assert list(router.route(MessageReceived(DECODE, StageGrant(part, 0, 0), ()))) == [2]


def test_prompt_whose_rows_go_to_a_hot_pool_goes_to_the_rank_with_the_fewest_tokens() -> None:
    ranks = schedulers(2)
    router = PrefillRouter(ranks)
    give(ranks[0], 1, [1] * 40)
    prompt, pages, hot_pages = (np.zeros(length, dtype=np.int32) for length in (10, 3, 3))
    assert list(router.route(MessageReceived(DECODE, destination(2), (prompt, pages, hot_pages)))) == [1]
    give(ranks[1], 2, [0] * 10)
    give(ranks[1], 3, [2] * 60)
    assert list(router.route(MessageReceived(DECODE, destination(2), (prompt, pages, hot_pages)))) == [1], "sent again"
