"""A decode scheduler with a KV store: it loads prefixes of prompts that it computes itself, and stores its output."""

import collections
import random
from typing import Any

import pytest

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode import transitions
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.placer import Placer
from pdserve.scheduler.decode.requests.request import Prompt
from pdserve.scheduler.decode.rooms.computing import Computing
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.effects import SendToFrontend, SendToPeer
from pdserve.scheduler.messages.frontend import Cancel, Finished, Submit
from pdserve.scheduler.messages.ranks import StoreLoad, StoreLoaded, StorePing, StorePinged, StoreWrite, StoreWritten
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.store import kv_store
from pdserve.scheduler.store.kv_store import StoreLimits, root_of
from pdserve.transfer.control.events import PeerLost
from pdserve.transfer.protocol.messages import InstanceId, KvDestination
from tests.examples import examples
from tests.scheduler.simulation.random_workloads import ACTIONS, STORE_ACTIONS, run_workload
from tests.scheduler.simulation.store_simulator import BLOCK, StoreSimulator
from tests.scheduler.simulation.timed_simulator import decode_limits

PAGE = 16


class Decode:
    """A decode server of one rank that computes its prompts; `stored` are the blocks in the store."""

    def __init__(self, local_prefill: str = "always") -> None:
        limits = decode_limits(local_prefill=local_prefill, max_step_tokens=64, page_size=PAGE)
        store = StoreLimits(root_of("model"), PAGE, ranks=1, timeout_s=1.0)
        self.scheduler = DecodeScheduler(limits, PageAllocator[KvPage](256), (), store_limits=store)
        self.stored: set[bytes] = set()
        self.finished: dict[str, Finished] = {}
        self.loads: list[StoreLoad] = []
        self.sent: list[KvDestination] = []
        self.computed = 0
        self.now = 0.0

    def turn(self) -> None:
        self.now += 0.01
        scheduler = self.scheduler
        scheduler.advance(self.now)
        self._perform()
        step = scheduler.next_step(self.now)
        self._perform()
        if step is not None:
            self.computed += sum(chunk.end - chunk.start for chunk in step.chunks)
            token = (TokenLogprob(7, None),)
            results = [StepResult(token, ()) for _ in step.rows]
            results += [StepResult(token if chunk.last else (), ()) for chunk in step.chunks]
            scheduler.step_done(step.command_id, results, self.now)
        self._perform()

    def _perform(self) -> None:
        store = self.scheduler.kv_store
        assert store is not None
        for effect in self.scheduler.take_effects():
            match effect:
                case StorePing():
                    store.handle(StorePinged(0), self.now)
                case StoreLoad():
                    self.loads.append(effect)
                case StoreWrite():
                    self.stored |= set(effect.blocks)
                    store.handle(StoreWritten(0, effect.number, len(effect.blocks), 1), self.now)
                case SendToPeer(message=KvDestination() as destination):
                    self.sent.append(destination)
                case SendToFrontend(message=Finished() as finished):
                    self.finished[finished.rid] = finished
                case _:
                    pass

    def answer_loads(self) -> None:
        for load in self.loads:
            there = next((i for i, block in enumerate(load.blocks) if block not in self.stored), len(load.blocks))
            self.scheduler.handle(StoreLoaded(0, load.number, there, 0.001), self.now)
        self.loads.clear()

    def serve(self, rid: str, prompt: list[int], new_tokens: int = 40) -> Finished:
        self.submit(rid, prompt, new_tokens)
        for _ in range(200):
            self.turn()
            self.answer_loads()
        self.scheduler.check_integrity()
        return self.finished[rid]

    def submit(self, rid: str, prompt: list[int], new_tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        self.scheduler.handle(Submit(rid, tuple(prompt), sampling), self.now)


def test_next_turn_is_loaded_after_the_pages_are_lost() -> None:
    decode = Decode()
    decode.turn()  # connects
    prompt = random.Random(1).choices(range(100), k=300)
    assert decode.serve("first", prompt).stored_tokens == 0
    decode.scheduler.flush_cache()
    decode.computed = 0
    turn = [*prompt, *[7] * 40, *range(50)]
    finished = decode.serve("second", turn)
    written = (300 + 39) // 32 * 32
    assert (finished.cached_tokens, finished.stored_tokens) == (written, written)
    assert decode.computed == len(turn) - written
    assert decode.scheduler.counters["store_tokens_loaded"] == written


def test_prompt_that_is_aborted_while_it_loads_keeps_its_pages_until_the_end_of_the_load() -> None:
    decode = Decode()
    decode.turn()
    decode.submit("gone", list(range(300)), 4)
    decode.turn()
    assert len(decode.loads) == 1
    decode.scheduler.handle(Cancel("gone"), decode.now)
    for _ in range(3):
        decode.turn()
    assert decode.scheduler.allocator.held > 0
    assert not decode.scheduler.idle
    decode.answer_loads()
    for _ in range(3):
        decode.turn()
    assert decode.scheduler.idle
    decode.scheduler.check_integrity()
    assert decode.scheduler.allocator.held == 0


def with_history(prompt: list[int]) -> Decode:
    """A server with `local_prefill` auto that has written a conversation to the store. Prefill is as fast as it is, and
    a decode step takes 10 ms.
    """
    decode = Decode("auto")
    decode.scheduler.placer._first_at = -100.0  # it has waited for a prefill server
    decode.turn()
    decode.serve("first", prompt)
    decode.scheduler.flush_cache()
    rates = decode.scheduler.rates
    rates.transfers.measured(1, 0.005)
    for rate in (rates.prefilled_tokens, rates.local_tokens):
        for tokens in (16, 64, 512, 2048):
            rate.measured(tokens, tokens / 10_000)
    times = decode.scheduler.rooms.computing.times
    times.started(1, 0, decode.now)
    times.ended(decode.now + 0.01)
    decode.scheduler.peer_up(PrefillPeer(InstanceId("prefill"), {"a:1"}))
    return decode


def test_turn_whose_history_is_in_the_store_is_computed_here() -> None:
    prompt = random.Random(2).choices(range(100), k=1000)
    decode = with_history(prompt)
    turn = [*prompt, *[7] * 40, *range(20)]
    assert decode.serve("second", turn).stored_tokens == 1039 // 32 * 32
    assert decode.scheduler.counters["local_prefill_short"] == 1
    assert not decode.sent
    decode.submit("new", turn[::-1], 4)
    decode.turn()
    assert len(decode.sent) == 1, "nothing of it is in the store"


@pytest.mark.parametrize("left", [0, 5])
def test_turn_goes_to_prefill_if_the_store_has_lost_its_history(left: int) -> None:
    prompt = random.Random(3).choices(range(100), k=1000)
    decode = with_history(prompt)
    decode.submit("second", [*prompt, *range(20)], 4)
    decode.turn()
    (load,) = decode.loads
    decode.stored = set(load.blocks[:left])
    decode.answer_loads()
    assert decode.scheduler.state_counts()["queued"] == 1
    decode.scheduler.check_integrity()
    decode.turn()
    assert len(decode.sent) == 1
    assert decode.scheduler.state_counts()["prefilling"] == 1
    assert not decode.loads


def test_turn_is_computed_here_if_its_history_and_the_prefill_server_are_lost() -> None:
    prompt = random.Random(4).choices(range(100), k=1000)
    decode = with_history(prompt)
    decode.submit("second", prompt, 4)
    decode.turn()
    decode.scheduler.handle(PeerLost(InstanceId("prefill"), "killed"), decode.now)
    decode.stored.clear()
    for _ in range(200):
        decode.turn()
        decode.answer_loads()
    assert decode.finished["second"].stored_tokens == 0


MODES: list[dict[str, Any]] = [
    {"overlap": True},
    {"stages": 2},
    {"overlap": True, "window": 9},
    {"overlap": True, "hot_pages": 12},
    {"stages": 2, "hot_pages": 9, "lends": True},
    {"hot_pages": 10, "lends": True},
]


@pytest.mark.parametrize("hisparse", [False, True])
def test_random_workloads_with_an_unreliable_store(monkeypatch: pytest.MonkeyPatch, hisparse: bool) -> None:
    """Every step finds the right KV, whatever the store loses or refuses, and all memory is free at the end. With
    HiSparse, loads go to host memory, and hot buffers are filled from there.
    """
    monkeypatch.setattr(kv_store, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(kv_store, "LEAST_TOKENS", BLOCK)
    modes = [mode for mode in MODES if ("hot_pages" in mode) is hisparse]
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(120, 12)):
        simulator = StoreSimulator(seed, local_prefill="always", **modes[seed % len(modes)])
        run_workload(simulator, STORE_ACTIONS, seed, steps=300)
        seen.update(simulator.store_seen)
        seen.update(simulator.decode.counters)
    for event in ("written", "loaded", "damaged", "store_tokens_loaded", "store_outages"):
        assert seen[event] >= examples(3, 1), f"{event} happened {seen[event]} times"


def test_random_workloads_with_prefill_servers_and_an_unreliable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go to prefill, are computed here, or go to prefill after the store has lost what was expected."""
    monkeypatch.setattr(kv_store, "BLOCK_TOKENS", BLOCK)
    for module in (kv_store, transitions):
        monkeypatch.setattr(module, "LEAST_TOKENS", BLOCK)
    seen: collections.Counter[str] = collections.Counter()
    requeue = transitions.Transitions._requeue

    def count(self: transitions.Transitions, prompt: Prompt, now: float) -> None:
        seen["load_failed"] += prompt.load_failed
        requeue(self, prompt, now)

    monkeypatch.setattr(transitions.Transitions, "_requeue", count)
    monkeypatch.setattr(Placer, "_local_rate", lambda *_: 400.0)
    monkeypatch.setattr(Computing, "short_tokens", lambda *_: 40)
    actions = {**ACTIONS, **STORE_ACTIONS, "deliver": 120, "flush": 40}
    for seed in range(examples(120, 12)):
        simulator = StoreSimulator(seed, damage=0.8, local_prefill="auto", **MODES[seed % len(MODES)])
        run_workload(simulator, actions, seed, steps=300)
        seen.update(simulator.store_seen)
        seen.update(simulator.decode.counters)
    for event in ("written", "store_lookups", "transfers", "loaded", "damaged", "load_failed"):
        least = examples(3, int(event in ("written", "store_lookups", "transfers")))
        assert seen[event] >= least, f"{event} happened {seen[event]} times"
