"""How much decode has at prefill servers: enough that they never wait, and no pages behind a long queue."""

import pytest

from pdserve.scheduler.decode.requests.dispatch_window import DEFAULT_TOKENS, DispatchWindow, PromptKind
from pdserve.transfer.protocol.messages import Load
from tests.scheduler.simulation.timed_simulator import LATENCY_S, TimedSimulator, decode_limits


@pytest.mark.parametrize(
    ("tokens_per_s", "step_s", "most_retractions", "ideal_s"),
    [
        (1700, 0.010, 0, 100_000 / 1700 + 10),  # prefill is the limit; the last one decodes for ten seconds
        (3000, 0.010, 0, 100_000 / 3000 + 10),
        (3000, 0.020, 0, 81),  # the batch of 32 is the limit: four rounds of twenty seconds
        (10_000, 0.020, 12, 81),
    ],
)
def test_running_requests_are_not_retracted_for_pages_behind_a_queue(
    tokens_per_s: float, step_s: float, most_retractions: int, ideal_s: float
) -> None:
    """100 x (1,000 + 1,000) tokens in a pool of 65,536. Without a window the first case had 68 retractions, computed
    207,000 tokens and took 132 s.
    """
    simulator = TimedSimulator(tokens_per_s=tokens_per_s, step_s=step_s)
    for number in range(100):
        simulator.ask(f"r{number}", 1000, 1000)
    simulator.run(lambda: not simulator.decode.requests)
    assert not simulator.failures
    assert simulator.decode.counters["retractions"] <= most_retractions
    (server,) = simulator.servers.values()
    assert server.scheduler.counters["prompt_tokens"] == pytest.approx(100_000, rel=0.002)
    assert simulator.now < 1.01 * ideal_s
    assert simulator.most_at_prefill < server.scheduler.load().window_tokens + 1000


@pytest.mark.parametrize(("tokens", "prompts"), [(5, 3000), (100, 300), (700, 60), (5000, 12)])
def test_prefill_never_waits_for_the_next_prompt(tokens: int, prompts: int) -> None:
    """However long they are: a step takes 20 ms at least, so short ones must share steps."""
    simulator = TimedSimulator(tokens_per_s=5000, least_step_s=0.02, limits=decode_limits(max_queued_requests=3000))
    simulator.run_for(1.0)
    began = simulator.now
    for number in range(prompts):
        simulator.ask(f"r{number}", tokens)
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.now - began < 1.03 * prompts * tokens / 5000 + 0.05
    assert simulator.most_at_prefill < 4000 + 2 * tokens


def test_two_decode_servers_share_a_prefill_server() -> None:
    """The other one has as much there as it can. Ours still has two prompts at a time, and its part of the steps."""
    simulator = TimedSimulator(tokens_per_s=5000)
    simulator.flood(8, 1000)
    simulator.run_for(2.0)
    began = simulator.now
    for number in range(20):
        simulator.ask(f"r{number}", 1000)
    simulator.run(lambda: not simulator.decode.requests)
    assert not simulator.failures
    assert simulator.most_at_prefill <= 2000
    assert simulator.busy_s > 0.99 * simulator.now
    assert simulator.now - began < 20_000 / 5000 * 8, "two of ten prompts are ours, and they are no shorter"


@pytest.mark.parametrize("pinned", [None, "a:1"])
def test_what_prefill_computes_first_is_sent_though_the_window_is_full(pinned: str | None) -> None:
    """Short prompts pass long ones there, and urgent ones all others: neither waits here for those."""
    simulator = TimedSimulator(tokens_per_s=1000)
    simulator.run_for(1.0)
    for number in range(6):
        simulator.ask(f"long {number}", 8000, endpoint=pinned)
    simulator.run_for(1.0)
    assert simulator.decode.state_counts()["queued"] == 4
    simulator.ask("short", 5)
    simulator.ask("urgent", 1000, priority=1)
    simulator.run_for(2 * LATENCY_S)
    assert simulator.decode.state_counts() | {"queued": 4, "prefilling": 4} == simulator.decode.state_counts()
    simulator.run(lambda: {"urgent", "short"} <= simulator.ended_at.keys(), most_s=3.0)
    simulator.run(lambda: not simulator.decode.requests)


def test_a_long_prompt_of_one_endpoint_does_not_hold_up_others() -> None:
    """Its server is busy; the other one is not, and takes those that are not pinned."""
    simulator = TimedSimulator(tokens_per_s=1000, endpoints=("a:1", "b:1"))
    simulator.run_for(1.0)
    for number in range(6):
        simulator.ask(f"a{number}", 4000, endpoint="a:1")
    simulator.run_for(0.1)
    assert simulator.decode.state_counts()["queued"] == 4
    simulator.ask("any", 4000)
    simulator.run(lambda: "any" in simulator.ended_at, most_s=4.5)
    simulator.run(lambda: not simulator.decode.requests)


def test_the_window_is_what_prefill_reports() -> None:
    window = DispatchWindow()
    long, short = PromptKind.of(0, 2000), PromptKind.of(0, 100)
    for _ in range(5):
        assert window.is_open(long)
        window.sent(long, 2000)
    assert not window.is_open(long), f"{DEFAULT_TOKENS} are sent"
    window.report(Load(window_tokens=20_000, waiting_tokens=10_000))
    assert window.is_open(long)
    window.report(Load(window_tokens=4000, waiting_tokens=10_000))
    assert not window.is_open(long)
    assert window.is_open(short)
    assert window.is_open(PromptKind.of(1, 2000)), "what matters less does not count"
    for _ in range(3):
        window.computed(long, 500)
        window.returned(long, 1500)
    assert (window.own_tokens, window.is_open(long)) == (4000, False)
    window.computed(long, 500)
    assert window.is_open(long)
    window.report(Load(window_tokens=4000, waiting_tokens=6000))
    assert (window.tokens_ahead, window.is_open(long)) == (6000, False), "2,500 are of others"
    window.returned(long, 1500)
    assert window.is_open(long), "a second one, whatever others do"
    window.sent(long, 2000)
    assert not window.is_open(long)


def test_short_prompts_have_a_window_of_their_own_size() -> None:
    window = DispatchWindow()
    window.report(Load(window_tokens=4000, waiting_tokens=50_000))
    short = PromptKind.of(0, 100)
    for _ in range(40):
        assert window.is_open(short)
        window.sent(short, 100)
    assert not window.is_open(short)
    assert window.is_open(PromptKind.of(0, 2000)), "nor do those close that of others"
