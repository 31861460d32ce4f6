"""Requests of models whose layers all have a sliding window: pages that they hold, send and reserve."""

import dataclasses

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, most_visible_pages
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.scheduler.decode.memory.request_memory import pages_needed, reserve
from pdserve.scheduler.decode.requests.request import Prompt, Request
from pdserve.scheduler.messages.frontend import Submit
from tests.scheduler.simulation.simulator import PAGE_SIZE, PAGES, PREFILL, Simulator
from tests.scheduler.simulation.timed_simulator import decode_limits

WINDOW = 7
MOST = int(most_visible_pages(WINDOW, PAGE_SIZE))


def run(simulator: Simulator, *, most_held: int) -> int:
    """Run until all requests have ended. Returns the most pages that decode held, at most `most_held`."""
    held = 0
    for _ in range(5000):
        simulator.work()
        simulator.check()
        held = max(held, simulator.decode.allocator.held)
        assert held <= most_held
        if not simulator.decode.requests:
            return held
    raise AssertionError(f"stuck: {simulator.decode.state_counts()}")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_long_generation_holds_the_pages_of_its_window(prefix_cache: bool) -> None:
    """The sequence is four times as long as the pool. Cached pages of the prompt are held a little longer: until the
    steps in flight have ended.
    """
    simulator = Simulator(window=WINDOW, prefill_window=WINDOW, overlap=True, prefix_cache=prefix_cache)
    rid = simulator.ask_for(tuple(range(10, 32)), new=180)
    run(simulator, most_held=MOST + prefix_cache)
    assert simulator.output[rid] == 180
    assert simulator.decode.counters["retractions"] == 0
    simulator.finish()


def test_pool_of_one_window_serves_a_long_sequence() -> None:
    simulator = Simulator(window=WINDOW, prefill_window=WINDOW, overlap=True, pages=MOST)
    rid = simulator.ask_for(tuple(range(10, 32)), new=100)
    run(simulator, most_held=MOST)
    assert simulator.output[rid] == 100
    simulator.finish()


def test_retracted_request_saves_only_visible_pages() -> None:
    """Three short prompts fit into the pool, but not their windows. Host memory has room for one window."""
    simulator = Simulator(window=WINDOW, prefill_window=WINDOW, pages=2 * MOST + 1, retract_pages=MOST)
    rids = [simulator.ask_for((10 + which, 20 + which), new=60) for which in range(3)]
    run(simulator, most_held=2 * MOST + 1)
    assert [simulator.output[rid] for rid in rids] == [60, 60, 60]
    assert simulator.decode.counters["retractions"] > 0
    assert simulator.decode.counters["retractions_recomputed"] == 0
    simulator.finish()


@pytest.mark.parametrize("local", [False, True])
def test_prompt_frees_pages_while_it_is_computed(local: bool) -> None:
    simulator = Simulator(
        window=WINDOW,
        prefill_window=WINDOW,
        local_prefill="always" if local else "never",
        prefix_cache=False,
        prefill=dataclasses.replace(PREFILL, prefix_cache=False),
    )
    simulator.ask_for(tuple(range(10, 34)), new=2)
    held: list[int] = []
    while simulator.decode.requests:
        simulator.work()
        simulator.check()
        scheduler = simulator.decode if local else next(iter(simulator.servers.values())).scheduler
        held.append(scheduler.allocator.held)
    page_size = PAGE_SIZE if local else PREFILL.page_size
    assert max(held) == 24 // page_size
    of_chunk = (8 if local else PREFILL.chunk_size) // page_size
    assert min(pages for pages in held if pages) <= most_visible_pages(WINDOW, page_size) + of_chunk
    simulator.finish()


def test_prompt_that_decode_computes_has_to_fit_into_its_pool() -> None:
    """A longer prompt is refused. Requests may grow beyond that length; then they are not computed again after a
    retraction, but saved.
    """
    simulator = Simulator(window=WINDOW, prefill_window=WINDOW, local_prefill="always", retract_pages=0, endpoints=())
    most = (PAGES - MOST + 1) * PAGE_SIZE
    too_long, *rids = (simulator.ask_for(tuple(range(tokens)), new=90) for tokens in (most + 1, most, 2, 3, 4))
    assert simulator.failures[too_long].status == 413
    assert f"{most} tokens" in simulator.failures[too_long].message
    run(simulator, most_held=PAGES)
    assert [simulator.output[rid] for rid in rids] == [90] * 4
    simulator.finish()


@pytest.mark.parametrize("servers", [0, 1])
def test_prompt_and_samples_that_decode_cannot_compute_do_not_wait_for_memory(servers: int) -> None:
    """The pool has room for the prompt with three samples, and later for the windows of more samples. So four samples
    wait for a prefill server. They used to wait for pages that never became free, and blocked all prompts behind them.
    """
    simulator = Simulator(
        window=6, prefill_window=6, local_prefill="auto", prefill_pages=40, endpoints=["a:1"][:servers]
    )
    three, four = (f"{samples} samples" for samples in (3, 4))
    for rid, samples in ((three, 3), (four, 4)):
        rids = [rid, *(f"{rid}, {sample}" for sample in range(1, samples))]
        simulator.submitted.update(rids)
        sampling = SamplingParams(max_new_tokens=4)
        simulator.decode.handle(
            Submit(rid, tuple(range(samples, 38 + samples)), sampling, more_rids=tuple(rids[1:])), simulator.now
        )
    for _ in range(400):
        simulator.work()
        simulator.check()
        simulator.pass_time(0.02)
    assert not simulator.decode.requests
    assert simulator.output[three] == 4
    if servers:
        assert simulator.output[four] == 4
    else:
        failed = simulator.failures[four]
        assert (failed.status, failed.code) == (503, "unavailable")
        assert "this server's KV pool does not hold the prompt and 4 samples" in failed.message
    simulator.finish()


@pytest.mark.parametrize(("tokens", "samples", "new"), [(1, 1, 100), (22, 1, 100), (24, 3, 100), (30, 2, 3), (8, 2, 1)])
def test_reservation_takes_no_more_pages_than_a_prompt_needs(tokens: int, samples: int, new: int) -> None:
    needed = pages_needed(tokens, samples, tokens + new - 1, PAGE_SIZE, WINDOW)
    assert needed <= samples * MOST
    pages = PageAllocator[KvPage](needed)
    prompt = Prompt(1, tuple(range(tokens)), now=0)
    sampling = SamplingParams(max_new_tokens=new)
    prompt.members = [Request(f"r{at}", prompt, sampling, deadline=9, now=0, sample=at) for at in range(samples)]
    cache = PrefixCache(pages, PAGE_SIZE, window=WINDOW)
    limits = decode_limits(page_size=PAGE_SIZE, growth_tokens=new, window=WINDOW)
    found = reserve(prompt, pages, cache, limits, most_cached=tokens)
    assert found is not None
    assert found.prefix_tokens == found.unseen_tokens == found.prompt.freed * PAGE_SIZE
    assert found.prefix_tokens <= max(0, tokens - WINDOW + 1)
    for grant in (found.prompt, *found.members):
        pages.release(grant)
    pages.check_integrity(idle=True)
