"""A prefill scheduler with a KV store: loads, aborts and failures. The test acts as the ranks."""

import random

import pytest

from pdserve.common.sampling import LogprobParams, SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import Effect, SendToPeer
from pdserve.scheduler.messages.lifecycle import PrefillState
from pdserve.scheduler.messages.ranks import (
    ChunkReport,
    StoreLoad,
    StoreLoaded,
    StorePing,
    StorePinged,
    StoreWrite,
    StoreWritten,
)
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.scheduler.store.kv_store import StoreLimits, root_of
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import Abort, AbortAck, InstanceId, KvDestination, PrefillDone, TransferKey

DECODE = InstanceId("decode")
PAGE = 16


class Prefill:
    """A prefill server of two ranks whose steps and writes succeed. `stored` are the blocks in the store."""

    def __init__(self, pages: int = 64) -> None:
        limits = PrefillLimits(
            page_size=PAGE,
            chunk_size=64,
            max_queued_requests=64,
            context_length=1 << 20,
            vocab_size=1 << 20,
            steps_in_flight=1,
        )
        store = StoreLimits(root_of("model"), PAGE, ranks=2, timeout_s=1.0)
        self.scheduler = PrefillScheduler(limits, PageAllocator[KvPage](pages), store_limits=store)
        self.scheduler.peer_up(DECODE, PageSpace(1 << 20, PAGE))
        self.stored: set[bytes] = set()
        self.loads: list[StoreLoad] = []
        self.computed = 0
        self.done: dict[int, PrefillDone] = {}
        self.acked: set[int] = set()
        self.fails = False
        self.now = 0.0

    def receive(self, number: int, prompt: list[int], logprobs: LogprobParams | None = None) -> None:
        wanted = KvDestination(TransferKey(number, 1), f"r{number}", SamplingParams(), timeout_s=1e6, logprobs=logprobs)
        indices = list(range(-(-len(prompt) // PAGE)))
        self.scheduler.receive(PrefillRequest(DECODE, wanted, prompt, indices, self.now), self.now)

    def turn(self) -> None:
        """One turn of the loop. Loads stay open until `answer`."""
        self.now += 0.1
        scheduler = self.scheduler
        scheduler.advance(self.now)
        self._perform(scheduler.take_effects())
        step = scheduler.next_step(self.now)
        if step is not None:
            self._perform(scheduler.take_effects())
            self.computed += sum(chunk.end - chunk.start for chunk in step.chunks)
            results = [StepResult((TokenLogprob(1, None),) if chunk.last else (), ()) for chunk in step.chunks]
            scheduler.step_done(step.command_id, results, self.now)
        self._perform(scheduler.take_effects())

    def answer(self, load: StoreLoad, *, fewer: int = 0) -> None:
        """Both ranks report a load; the second has `fewer` blocks."""
        self.loads.remove(load)
        there = 0
        while there < len(load.blocks) and load.blocks[there] in self.stored:
            there += 1
        problem = "no answer" if self.fails else None
        for rank, blocks in ((0, there), (1, max(0, there - fewer))):
            report = StoreLoaded(rank, load.number, 0 if problem else blocks, 0.01, problem=problem)
            self.scheduler.handle(report, self.now)

    def serve(self) -> None:
        """Until every request has ended."""
        for _ in range(1000):
            while self.loads:
                self.answer(self.loads[0])
            self.turn()
            store = self.scheduler.kv_store
            assert store is not None
            if not self.scheduler.requests and not store.busy and not store.gauges()["kv_store_queued_blocks"]:
                break
        assert not self.scheduler.requests
        self.scheduler.check_integrity()

    def _perform(self, effects: list[Effect]) -> None:
        store = self.scheduler.kv_store
        assert store is not None
        for effect in effects:
            match effect:
                case ChunkWrite():
                    ended = ChunkWritten(DECODE, effect.key, effect.token_start, effect.token_end, ok=True)
                    self.scheduler.handle(ChunkReport(0, ended), self.now)
                case StorePing():
                    for rank in range(2):
                        store.handle(StorePinged(rank, "no answer" if self.fails else None), self.now)
                case StoreLoad():
                    self.loads.append(effect)
                case StoreWrite():
                    if not self.fails:
                        self.stored |= set(effect.blocks)
                    for rank in range(2):
                        problem = "no answer" if self.fails else None
                        store.handle(StoreWritten(rank, effect.number, len(effect.blocks), 1, problem), self.now)
                case SendToPeer(message=PrefillDone() as done):
                    self.done[done.key.transfer_id] = done
                case SendToPeer(message=AbortAck(key=key)):
                    self.acked.add(key.transfer_id)
                case _:
                    pass
        if more := self.scheduler.take_effects():
            self._perform(more)


@pytest.fixture
def prefill() -> Prefill:
    started = Prefill()
    started.turn()  # connects
    return started


def prompt_of(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def compute_and_forget(prefill: Prefill, prompt: list[int]) -> None:
    """The KV of a prompt is in the store, and in no local page."""
    prefill.receive(1000, prompt)
    prefill.serve()
    prefill.scheduler.flush_cache()
    prefill.computed = 0


def test_prefix_in_the_store_is_not_computed(prefill: Prefill) -> None:
    prompt = prompt_of(1, 300)
    compute_and_forget(prefill, prompt)
    prefill.receive(1, prompt)
    prefill.serve()
    done = prefill.done[1]
    assert (done.cached_tokens, done.stored_tokens, prefill.computed) == (288, 288, 12)
    assert prefill.scheduler.counters["store_tokens_loaded"] == 288


def test_stored_tokens_do_not_include_the_local_prefix(prefill: Prefill) -> None:
    prompt = prompt_of(2, 300)
    compute_and_forget(prefill, prompt)
    prefill.receive(1, prompt[:80])
    prefill.serve()
    prefill.receive(2, prompt)
    prefill.serve()
    assert (prefill.done[2].cached_tokens, prefill.done[2].stored_tokens) == (288, 288 - 80)


def test_loaded_pages_serve_later_prompts(prefill: Prefill) -> None:
    prompt = prompt_of(3, 300)
    compute_and_forget(prefill, prompt)
    for number in (1, 2):
        prefill.receive(number, prompt)
        prefill.serve()
    assert (prefill.done[2].cached_tokens, prefill.done[2].stored_tokens) == (288, 0)


def test_others_compute_while_a_prompt_loads(prefill: Prefill) -> None:
    prompt = prompt_of(4, 300)
    compute_and_forget(prefill, prompt)
    prefill.receive(1, prompt)
    prefill.turn()
    prefill.receive(2, prompt_of(5, 40))
    for _ in range(3):
        prefill.turn()
    assert 2 in prefill.done
    assert prefill.scheduler.state_counts()["loading"] == 1
    assert prefill.scheduler.load().waiting_requests == 1
    prefill.serve()
    assert prefill.done[1].stored_tokens == 288


def test_abort_during_a_load_is_acknowledged_at_once_and_pages_are_released_later(prefill: Prefill) -> None:
    prompt = prompt_of(6, 300)
    compute_and_forget(prefill, prompt)
    prefill.receive(1, prompt)
    prefill.turn()
    prefill.scheduler.handle(MessageReceived(DECODE, Abort(TransferKey(1, 1), "the client has gone"), ()), prefill.now)
    prefill.turn()
    assert prefill.acked == {1}
    assert prefill.scheduler.allocator.held == 18  # ranks may still write them
    prefill.serve()
    assert prefill.scheduler.allocator.held == 0


def test_logits_of_scored_tokens_are_computed(prefill: Prefill) -> None:
    prompt = prompt_of(7, 300)
    compute_and_forget(prefill, prompt)
    prefill.receive(1, prompt, LogprobParams(start=101))
    prefill.serve()
    assert prefill.done[1].cached_tokens == 96


@pytest.mark.parametrize("seed", range(6))
def test_random_workloads_release_all_memory(seed: int) -> None:
    """Prompts that share prefixes, aborts, outages, ranks that loaded different amounts, and few pages."""
    chance = random.Random(seed)
    prefill = Prefill(pages=48)
    base = prompt_of(seed, 400)
    sent = 0
    for _ in range(400):
        match chance.randrange(8):
            case 0 | 1:
                sent += 1
                tail = chance.choices(range(1000), k=chance.randrange(1, 100))
                prefill.receive(sent, base[: chance.randrange(0, 400)] + tail)
            case 2 if prefill.scheduler.requests:
                request = chance.choice(list(prefill.scheduler.requests.values()))
                prefill.scheduler.handle(MessageReceived(DECODE, Abort(request.key, "gone"), ()), prefill.now)
            case 3 | 4 if prefill.loads:
                prefill.answer(chance.choice(prefill.loads), fewer=chance.choice([0, 0, 1, 5]))
            case 5:
                prefill.fails = chance.random() < 0.1
            case 6 if chance.random() < 0.3:
                prefill.scheduler.flush_cache()
            case _:
                prefill.turn()
        assert all(
            request.state is not PrefillState.LOADING or request.grant is not None
            for request in prefill.scheduler.requests.values()
        )
    prefill.fails = False
    prefill.serve()
    assert len(prefill.done) + len(prefill.acked) == sent
    assert prefill.scheduler.counters["store_outages"] > 0
    assert prefill.scheduler.counters["store_tokens_loaded"] > 0
