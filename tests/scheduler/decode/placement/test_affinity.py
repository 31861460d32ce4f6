"""Conversations over several prefill servers: how much of their history is computed again.

The schedulers are real; time is simulated. The baseline is one prefill server with the memory and the speed of all.
"""

import random
from functools import partial

import pytest

from pdserve.configs.setting_types import DispatchSetting
from tests.scheduler.simulation.timed_simulator import VOCAB, TimedSimulator, decode_limits

CONVERSATIONS = 50
TURNS = 10
SYSTEM_PROMPT = tuple(range(200))
OUTPUT = 8
MEMORY = 100_000
"""Tokens of all prefill caches together: the conversations end with about 1,600 tokens each."""
TOKENS_PER_S = 20_000.0
"""Of all prefill servers together."""
THINK_S = 1.0


class Conversations(TimedSimulator):
    """Users that send their next turn a while after the last answer."""

    def __init__(self, servers: int, dispatch: DispatchSetting, *, page_size: int = 16) -> None:
        super().__init__(
            tokens_per_s=TOKENS_PER_S / servers,
            pool_tokens=400_000,
            prefill_tokens=MEMORY // servers,
            prefill_page_size=page_size,
            limits=decode_limits(dispatch=dispatch, max_running_requests=64),
            endpoints=tuple(f"{name}:1" for name in "abcd"[:servers]),
        )
        self._waiting: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self._left = CONVERSATIONS
        self.prompt_tokens = 0
        for number in range(CONVERSATIONS):
            begin = random.Random(number).uniform(0, THINK_S)
            self.at(begin, partial(self._ask, number, 0, SYSTEM_PROMPT))

    def _ask(self, number: int, turn: int, history: tuple[int, ...]) -> None:
        rid = f"{number}.{turn}"
        words = random.Random(rid)
        message = tuple(words.randrange(VOCAB) for _ in range(words.randint(20, 250)))
        prompt = history + message
        self.prompt_tokens += len(prompt)
        self._waiting[rid] = number, turn, prompt
        self.submit_prompt(rid, prompt, OUTPUT)

    def converse(self) -> int:
        """Run all conversations; returns the prompt tokens that prefill servers found in their caches."""
        self.run(self._all_done, most_s=10_000)
        assert not self.decode.counters["requests_failed"]
        return sum(server.scheduler.counters["prefix_tokens_reused"] for server in self.servers.values())

    def _all_done(self) -> bool:
        for rid in [rid for rid in self._waiting if rid in self.ended_at]:
            number, turn, prompt = self._waiting.pop(rid)
            if turn + 1 == TURNS:
                self._left -= 1
                continue
            history = prompt + (50,) * OUTPUT
            think_s = random.Random(-number * TURNS - turn).expovariate(1 / THINK_S)
            self.at(self.now + think_s, partial(self._ask, number, turn + 1, history))
        return not self._left


def test_prompts_that_come_one_by_one_go_to_the_servers_in_turn_by_load() -> None:
    simulator = TimedSimulator(
        tokens_per_s=TOKENS_PER_S,
        pool_tokens=10_000,
        prefill_tokens=10_000,
        limits=decode_limits(dispatch="load"),
        endpoints=("a:1", "b:1"),
    )
    for number in range(6):
        simulator.at(number, partial(simulator.submit_prompt, str(number), tuple(range(64)), 1))
    simulator.run(lambda: len(simulator.ended_at) == 6, most_s=100)
    finished = [server.scheduler.counters["requests_finished"] for server in simulator.servers.values()]
    assert finished == [3, 3]


@pytest.mark.slow
def test_conversations_reuse_as_much_on_two_servers_as_on_one() -> None:
    """About 99 %, also with pages of another size on prefill; by load alone it is about 80 %."""
    one = Conversations(1, "load").converse()
    assert Conversations(2, "load").converse() < 0.9 * one
    assert Conversations(2, "prefix", page_size=64).converse() >= 0.95 * one
    conversations = Conversations(2, "prefix")
    reused, counters = conversations.converse(), conversations.decode.counters
    assert reused >= 0.95 * one
    assert counters["dispatch_tokens_reused"] == reused
    assert counters["dispatch_tokens_expected"] == pytest.approx(reused, rel=0.05)
    assert counters["dispatch_prefix"] + counters["dispatch_load"] == CONVERSATIONS * TURNS
    assert counters["dispatch_prefix"] > 0.95 * CONVERSATIONS * TURNS


def test_next_turn_leaves_an_overloaded_server_with_its_prefix() -> None:
    """Another decode server keeps the server with the prefix busy: the next turn goes to the other one."""
    simulator = TimedSimulator(tokens_per_s=1000, limits=decode_limits(), endpoints=("a:1", "b:1"))
    simulator.run_for(1.0)
    prompt = tuple(range(160))
    simulator.submit_prompt("first", prompt, 1)
    simulator.run(lambda: "first" in simulator.ended_at)
    first, second = simulator.servers.values()
    assert first.scheduler.counters["requests"] == 1
    simulator.flood(prompts=20, tokens=4000)
    simulator.run_for(1.0)
    simulator.submit_prompt("second", prompt + prompt, 1)
    simulator.run(lambda: "second" in simulator.ended_at)
    assert second.scheduler.counters["requests"] == 1
    assert simulator.decode.counters["dispatch_load"] == 2


def test_prompt_waits_for_the_server_with_its_prefix_and_others_overtake_it() -> None:
    """Long prompts fill the window of the server with the prefix. The next turn waits; a new prompt does not."""
    simulator = TimedSimulator(
        tokens_per_s=1000, limits=decode_limits(), endpoints=("a:1", "b:1"), prefill_tokens=200_000
    )
    simulator.run_for(1.0)
    history = tuple(number % VOCAB for number in range(12_000))
    simulator.submit_prompt("first", history, 1)
    simulator.run(lambda: "first" in simulator.ended_at)
    home, other = simulator.servers.values()
    for number in range(2):
        simulator.submit_prompt(f"long {number}", history + (number,) * 6000, 1)
    simulator.run_for(1.0)
    assert home.scheduler.counters["requests"] == 3, "the long prompts have the same prefix"
    simulator.submit_prompt("second", history + (9,) * 5000, 1)
    simulator.submit_prompt("unrelated", tuple(range(500, 900)) * 40, 1)
    simulator.run(lambda: "second" in simulator.ended_at and "unrelated" in simulator.ended_at)
    assert home.scheduler.counters["requests"] == 4
    assert other.scheduler.counters["requests"] == 1


def test_servers_that_report_no_cache_get_prompts_by_load() -> None:
    """Like those of an older release. By load, and with one prefill server, decode does not ask for reports."""
    one = TimedSimulator(tokens_per_s=1000, limits=decode_limits())
    assert not one.decode.load().cache_reports
    by_load = TimedSimulator(tokens_per_s=1000, limits=decode_limits(dispatch="load"), endpoints=("a:1", "b:1"))
    by_load.run_for(1.0)
    older = TimedSimulator(tokens_per_s=1000, limits=decode_limits(), endpoints=("a:1", "b:1"), reports=False)
    for simulator in (by_load, older):
        for rid in ("first", "second"):
            simulator.submit_prompt(rid, tuple(range(160)), 1)
            simulator.run(lambda rid=rid, simulator=simulator: rid in simulator.ended_at)  # type: ignore[misc]
        assert simulator.decode.peers.hashed_page_sizes == ()
        assert simulator.decode.counters["dispatch_load"] == 2
        assert simulator.decode.counters["dispatch_tokens_expected"] == 0
