"""Which data-parallel rank gets a prompt: lengths decide, on simulated requests of lognormal lengths."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.balancer import choose_for_submit, rebalance
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import ConnectPeer
from pdserve.scheduler.messages.frontend import Cancel, Submit
from pdserve.transfer.protocol.messages import InstanceId

PAGE, RANKS = 16, 4
MEAN_LOG, SIGMA, MOST = 6.0, 1.0, 6000
"""Lengths: a median of 400 tokens, a mean of 660."""
OPEN, TURNS = 160, 1000
"""Requests that are open at a time, and how many end."""
WITHIN, COUNTS_LEAVE = 0.15, 0.3

Choose = Callable[[Sequence[DecodeScheduler], Submit], int]


def make_ranks(*, pages: int = 8192, running: int = 512) -> list[DecodeScheduler]:
    limits = DecodeLimits(
        page_size=PAGE,
        max_running_requests=running,
        max_queued_requests=1000,
        growth_tokens=PAGE,
        retract_pages=0,
        queue_timeout_s=60,
        prefill_wait_s=3,
        prefill_timeout_s=60,
        request_timeout_s=600,
        quarantine_s=1,
        local_prefill="always",
        prefix_cache=False,
    )
    return [DecodeScheduler(limits, PageAllocator[KvPage](pages), [1]) for _ in range(RANKS)]


def prompt(rid: int, tokens: int) -> Submit:
    return Submit(str(rid), (7,) * tokens, SamplingParams(max_new_tokens=4, ignore_eos=True))


def fewest_requests(schedulers: Sequence[DecodeScheduler], _: Submit) -> int:
    return min(range(RANKS), key=lambda number: len(schedulers[number].requests))


def imbalance(choose: Choose, seed: int) -> float:
    """How far the rank that is farthest from the mean has more or fewer tokens, as a share of the mean: the 95th
    percentile over time.
    """
    draw, ranks, found = random.Random(seed), make_ranks(), []
    numbers = itertools.count()
    open_requests: list[tuple[int, Submit]] = []
    for turn in range(TURNS):
        while len(open_requests) < OPEN:
            length = min(MOST, max(1, round(draw.lognormvariate(MEAN_LOG, SIGMA))))
            submit = prompt(next(numbers), length)
            number = choose(ranks, submit)
            ranks[number].handle(submit, float(turn))
            open_requests.append((number, submit))
        tokens = [0] * RANKS
        for number, submit in open_requests:
            tokens[number] += len(submit.prompt_ids)
        mean = sum(tokens) / RANKS
        if turn >= OPEN:
            found.append(max(abs(count - mean) for count in tokens) / mean)
        number, submit = open_requests.pop(draw.randrange(len(open_requests)))
        ranks[number].handle(Cancel(submit.rid), float(turn))
    return sorted(found)[len(found) * 95 // 100]


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_have_equal_kv_where_equal_counts_leave_them_unequal(seed: int) -> None:
    assert imbalance(fewest_requests, seed) > COUNTS_LEAVE
    assert imbalance(choose_for_submit, seed) < WITHIN


def test_rank_without_a_place_in_its_batch_is_chosen_last() -> None:
    """Rank 0 has many short requests, the others a long one each."""
    ranks = make_ranks(running=8)
    for rid in range(8):
        ranks[0].handle(prompt(rid, 1), 0.0)
    for number in range(1, RANKS):
        ranks[number].handle(prompt(10 + number, 1000 + 100 * number), 0.0)
    assert choose_for_submit(ranks, prompt(20, 1)) == 1
    ranks[0].handle(Cancel("0"), 0.0)
    assert choose_for_submit(ranks, prompt(21, 1)) == 0


def test_prompts_that_wait_count_as_their_kv() -> None:
    ranks = make_ranks()
    chosen = []
    for rid, tokens in enumerate((900, 600, 300, 200, 200, 200)):
        number = choose_for_submit(ranks, submit := prompt(rid, tokens))
        ranks[number].handle(submit, 0.0)
        chosen.append(number)
    assert chosen == [0, 1, 2, 3, 3, 2]


def test_rank_that_gets_a_prompt_has_the_whole_wait_to_pair_with_its_prefill_server() -> None:
    """The prompt has waited longer than `prefill_wait_s` for pages, and its new rank has never connected there."""
    limits = dataclasses.replace(make_ranks(pages=10)[0].limits, local_prefill="never")
    full, free = (DecodeScheduler(limits, PageAllocator[KvPage](10), [1]) for _ in range(2))
    full.peer_up(PrefillPeer(InstanceId("prefill"), {"here:1"}))
    for rid in range(2):
        full.handle(msgspec.structs.replace(prompt(rid, 100), endpoint="here:1"), 0.0)
        full.advance(0.0)
    moved_at = 2 * limits.prefill_wait_s
    full.advance(moved_at)
    assert rebalance([full, free], moved_at) == {1}
    free.advance(moved_at)
    assert ConnectPeer("here:1", "") in free.take_effects()
    free.advance(moved_at + 0.9 * limits.prefill_wait_s)
    assert free.state_counts()["queued"] == 1
    free.advance(moved_at + limits.prefill_wait_s)
    assert not free.requests


def test_prompt_does_not_move_between_ranks_of_which_none_can_compute_it() -> None:
    """With a sliding window it would hold few pages later, but while a rank computes it, it needs all."""
    limits = dataclasses.replace(make_ranks(pages=10)[0].limits, window=2 * PAGE)
    ranks = [DecodeScheduler(limits, PageAllocator[KvPage](10), [1]) for _ in range(2)]
    for number, scheduler in enumerate(ranks):
        scheduler.handle(prompt(number, 5 * PAGE), 0.0)
        scheduler.advance(0.0)
    ranks[0].handle(prompt(2, 7 * PAGE), 0.0)
    for _ in range(3):
        for scheduler in ranks:
            scheduler.advance(0.0)
        assert not rebalance(ranks, 0.0)
    ranks[1].handle(Cancel("1"), 0.0)
    assert rebalance(ranks, 0.0) == {1}
    ranks[1].advance(0.0)
    assert ranks[1].state_counts()["computing"] == 1
