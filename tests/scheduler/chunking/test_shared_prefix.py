"""Prompts with a common prefix: one computes it, on a prefill server or on decode, and the others wait for it."""

import pytest

from pdserve.scheduler.chunking.shared_prefix import AwaitedPrefix, PrefixesInProgress
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.rooms.batch import DecodeStep
from pdserve.scheduler.messages.frontend import Cancel
from pdserve.scheduler.messages.lifecycle import PrefillState
from tests.scheduler.simulation.timed_simulator import TimedSimulator, decode_limits

PAGE = 16
LEADER = tuple(range(1000, 1320))


def sharing(tokens: int, own: int) -> tuple[int, ...]:
    """A prompt that has the first `tokens` tokens of LEADER, then `own` others."""
    return LEADER[:tokens] + tuple(range(own))


def found(prompt: tuple[int, ...], *, cached: int = 0, priority: int = 0, step: int = 512) -> int | None:
    """The end of the prefix that a prompt waits for, while LEADER is computed from token `cached` on."""
    prefixes = PrefixesInProgress(PAGE, step)
    prefixes.start(LEADER, cached, priority=0)
    awaited = prefixes.find(prompt, cached, len(prompt) - 1, priority)
    return awaited.end if awaited is not None else None


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        (sharing(256, 64), 256),
        (sharing(250, 64), 240),  # full pages
        (LEADER, 304),  # all but the last page, whose last token is computed anyway
        (sharing(256, 256), 256),
        (sharing(256, 257), None),  # less than half of the prompt
        (sharing(160, 16), 160),
        (sharing(144, 16), None),  # less than half of the step of the other prompt
        (sharing(0, 320), None),
        (sharing(8, 8), None),
    ],
)
def test_a_prompt_waits_for_a_prefix_that_is_half_of_what_is_computed(prompt: tuple[int, ...], end: int | None) -> None:
    assert found(prompt) == end


def test_a_prompt_does_not_wait_for_all_steps_of_a_longer_one() -> None:
    assert found(sharing(144, 16), step=288) == 144
    assert found(sharing(144, 16), step=289) is None, "more than twice the shared tokens would be computed meanwhile"


def test_a_prompt_does_not_wait_for_few_tokens() -> None:
    assert found(sharing(320, 0), cached=240) == 304
    assert found(sharing(320, 0), cached=256) is None


def test_a_prompt_does_not_wait_for_one_of_lower_priority() -> None:
    assert found(LEADER, priority=-1) == found(LEADER) == 304
    assert found(LEADER, priority=1) is None


def test_a_prefix_that_differs_before_the_next_page_is_not_shared() -> None:
    assert found((7, *LEADER[1:]), cached=64) is None


def test_a_wait_ends_when_the_shared_tokens_are_computed_or_the_prompt_is_given_up() -> None:
    prefixes = PrefixesInProgress(PAGE, 128)
    leader = prefixes.start(LEADER, 0, priority=0)
    awaited = prefixes.find(sharing(256, 64), 0, 319, priority=0)
    assert awaited == AwaitedPrefix(leader, 256)
    prefixes.cached(leader, 128)
    assert awaited.tokens_left == 128
    later = prefixes.find(sharing(256, 64), 128, 319, priority=0)
    assert later == awaited, "a prompt that arrives later finds the rest"
    prefixes.cached(leader, 256)
    assert awaited.tokens_left == 0
    whole = AwaitedPrefix(leader, 304)
    assert whole.tokens_left == 48
    prefixes.end(leader)
    assert whole.tokens_left == 0
    assert not len(prefixes)


def test_the_first_of_two_prompts_with_the_same_page_is_awaited() -> None:
    prefixes = PrefixesInProgress(PAGE, 512)
    first, second = (prefixes.start(LEADER, 0, priority=0) for _ in range(2))
    prefixes.end(second)
    awaited = prefixes.find(LEADER, 0, 319, priority=0)
    assert awaited is not None
    assert awaited.leader is first


def test_no_prompt_waits_without_a_prefix_cache() -> None:
    prefixes = PrefixesInProgress(PAGE, 512, enabled=False)
    leader = prefixes.start(LEADER, 0, priority=0)
    prefixes.cached(leader, 64)
    assert prefixes.find(LEADER, 64, 319, priority=0) is None
    prefixes.end(leader)


SHARED, OWN, PROMPTS = 256, 64, 6


class Burst(TimedSimulator):
    """Like the CPU of a small machine. Prompts with one prefix are submitted at once."""

    def __init__(self, local_prefill: str, *, shares_device: bool = False) -> None:
        self.tokens_here = 0
        """Prompt tokens that the decode server has computed."""
        limits = decode_limits(local_prefill=local_prefill, max_step_tokens=512)
        super().__init__(tokens_per_s=150, step_s=0.08, limits=limits)
        if shares_device:
            for server in self.servers.values():
                self.decode.peer_up(PrefillPeer(server.instance, {server.endpoint}, shares_device=True))

    def submit_all(self) -> None:
        for number in range(PROMPTS):
            own = tuple(range(100 * number, 100 * number + OWN))
            self.submit_prompt(f"r{number}", tuple(range(SHARED)) + own, 32)
        self.run(lambda: len(self.ended_at) == PROMPTS)

    def _seconds_of(self, step: DecodeStep) -> float:
        self.tokens_here += sum(chunk.end - chunk.start for chunk in step.chunks)
        return super()._seconds_of(step)

    @property
    def tokens_at_prefill(self) -> int:
        return sum(server.scheduler.counters["prompt_tokens"] for server in self.servers.values())


def test_prefill_server_computes_a_shared_prefix_once() -> None:
    simulator = Burst("never")
    simulator.submit_all()
    assert simulator.tokens_at_prefill == SHARED + PROMPTS * OWN
    (server,) = simulator.servers.values()
    assert server.scheduler.counters["prefix_waits"] > 0


def test_a_prompt_that_waits_for_its_prefix_delays_no_other() -> None:
    simulator = Burst("never")
    for number in range(2):
        simulator.submit_prompt(f"r{number}", tuple(range(SHARED)) + (number,) * OWN, 1)
    simulator.ask("other", SHARED)
    simulator.run_for(0.01)
    (server,) = simulator.servers.values()
    first, second, other = server.scheduler.requests.values()
    assert [request.awaits_prefix for request in (first, second, other)] == [False, True, False]
    assert (second.state, other.state) == (PrefillState.WAITING, PrefillState.COMPUTING)


def test_decode_server_computes_a_shared_prefix_once() -> None:
    simulator = Burst("always")
    simulator.submit_all()
    assert simulator.tokens_here == SHARED + PROMPTS * OWN
    assert simulator.decode.counters["prefix_waits"] == PROMPTS - 1


def test_auto_computes_all_prompts_here_if_both_servers_share_a_device() -> None:
    simulator = Burst("auto", shares_device=True)
    simulator.ask("first", OWN)  # measures the prefill server
    simulator.run(lambda: simulator.ended_at.pop("first", None))
    simulator.submit_all()
    assert simulator.decode.counters["local_prefill_shared_device"] == PROMPTS
    assert simulator.tokens_at_prefill == OWN
    assert simulator.tokens_here == SHARED + PROMPTS * OWN


def test_auto_expects_prompts_to_share_what_each_side_computes() -> None:
    """Two servers of their own: each computes the prefix at most once."""
    simulator = Burst("auto")
    simulator.ask("first", OWN)
    simulator.run(lambda: simulator.ended_at.pop("first", None))
    simulator.submit_all()
    sides = simulator.tokens_here, simulator.tokens_at_prefill - OWN
    assert sum(sides) <= 2 * SHARED + PROMPTS * OWN, sides
    assert not simulator.decode.rooms.prefilling.prefixes
    assert not simulator.decode.rooms.computing.prefixes


def test_prompts_wait_for_the_next_one_with_their_prefix_if_the_first_is_aborted() -> None:
    simulator = Burst("always")
    for number in range(3):
        simulator.submit_prompt(f"r{number}", tuple(range(SHARED)) + (number,) * OWN, 1)
    simulator.run_for(0.01)
    simulator.decode.handle(Cancel("r0"), simulator.now)
    simulator.run(lambda: {"r1", "r2"} <= simulator.ended_at.keys())
    assert simulator.decode.counters["prefix_waits"] == 3
    assert simulator.tokens_here == SHARED + OWN + SHARED + 2 * OWN, "the first prompt was already in a step"
