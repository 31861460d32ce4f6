"""The dispatch window: prefill servers are always busy, and decode holds no pages for prompts in a long queue."""

import sys
import threading
from collections.abc import Iterator

import pytest

from pdserve.scheduler.decode.placement.peers import DEFAULT_TOKENS, DispatchWindow
from pdserve.scheduler.decode.requests.request import Prompt, PromptKind
from pdserve.transfer.protocol.messages import Load
from tests.scheduler.simulation.timed_simulator import LATENCY_S, TimedSimulator, decode_limits


def kind_of(priority: int, tokens: int) -> PromptKind:
    return Prompt(1, (1,) * tokens, priority=priority, now=0.0).kind()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens_per_s", "step_s", "most_retractions", "ideal_s"),
    [
        (1700, 0.010, 0, 100_000 / 1700 + 10),  # prefill is the limit; the last request decodes for ten seconds
        (3000, 0.010, 0, 100_000 / 3000 + 10),
        (3000, 0.020, 0, 81),  # the batch of 32 is the limit: four rounds of twenty seconds
        (10_000, 0.020, 14, 81),
    ],
)
def test_running_requests_are_not_retracted_for_dispatched_prompts(
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


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "prompts"), [(5, 1500), (100, 300), (700, 60), (5000, 12)])
def test_prefill_is_always_busy_while_prompts_are_queued(tokens: int, prompts: int) -> None:
    """For all lengths: a step takes at least 20 ms, so short prompts have to share steps."""
    simulator = TimedSimulator(tokens_per_s=5000, least_step_s=0.02, limits=decode_limits(max_queued_requests=3000))
    simulator.run_for(1.0)
    began = simulator.now
    for number in range(prompts):
        simulator.ask(f"r{number}", tokens)
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.now - began < 1.03 * prompts * tokens / 5000 + 0.05
    assert simulator.most_at_prefill < 4000 + 2 * tokens


def test_two_decode_servers_get_a_share_of_a_prefill_server() -> None:
    """The other server fills its window. Ours still has two prompts at a time, and its share of the steps."""
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
    assert simulator.now - began < 20_000 / 5000 * 8, "two of ten prompts are ours, and all have the same length"


@pytest.mark.parametrize("pinned", [None, "a:1"])
def test_short_and_urgent_prompts_are_sent_although_the_window_is_full(pinned: str | None) -> None:
    """Prefill computes short prompts and higher priorities before the others, so they do not wait in our queue."""
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


def test_long_prompt_of_one_endpoint_does_not_block_others() -> None:
    """Its server is busy; the other one is not, and takes prompts without an endpoint."""
    simulator = TimedSimulator(tokens_per_s=1000, endpoints=("a:1", "b:1"))
    simulator.run_for(1.0)
    for number in range(6):
        simulator.ask(f"a{number}", 4000, endpoint="a:1")
    simulator.run_for(0.1)
    assert simulator.decode.state_counts()["queued"] == 4
    simulator.ask("any", 4000)
    simulator.run(lambda: "any" in simulator.ended_at, most_s=4.5)
    simulator.run(lambda: not simulator.decode.requests)


def test_window_has_the_size_that_prefill_reports() -> None:
    window = DispatchWindow()
    long, short = kind_of(0, 2000), kind_of(0, 100)
    for _ in range(5):
        assert window.is_open(long)
        window.sent(long, 2000)
    assert not window.is_open(long), f"{DEFAULT_TOKENS} are sent"
    window.report(Load(window_tokens=20_000, waiting_tokens=10_000))
    assert window.is_open(long)
    window.report(Load(window_tokens=4000, waiting_tokens=10_000))
    assert not window.is_open(long)
    assert window.is_open(short)
    assert window.is_open(kind_of(1, 2000)), "lower priorities do not count"
    for _ in range(3):
        window.computed(long, 500)
        window.returned(long, 1500)
    assert (window.own_tokens, window.is_open(long)) == (4000, False)
    window.computed(long, 500)
    assert window.is_open(long)
    window.report(Load(window_tokens=4000, waiting_tokens=6000))
    assert (window.tokens_ahead, window.is_open(long)) == (6000, False), "2,500 belong to other decode servers"
    window.returned(long, 1500)
    assert window.is_open(long), "a second one is always allowed"
    window.sent(long, 2000)
    assert not window.is_open(long)


def test_short_prompts_have_their_own_window() -> None:
    window = DispatchWindow()
    window.report(Load(window_tokens=4000, waiting_tokens=50_000))
    short = kind_of(0, 100)
    for _ in range(40):
        assert window.is_open(short)
        window.sent(short, 100)
    assert not window.is_open(short)
    assert window.is_open(kind_of(0, 2000)), "short prompts do not close the window of the others"


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("frequent_thread_switches")
def test_another_thread_reads_the_tokens_ahead_while_prompts_come_and_go() -> None:
    """The thread that sends the status reads them. Iterating over a dictionary that changes would raise."""
    window, done = DispatchWindow(), threading.Event()
    kinds = [kind_of(priority, 100) for priority in range(64)]

    def send() -> None:
        while not done.is_set():
            for kind in kinds:
                window.sent(kind, 100)
            for kind in kinds:
                window.returned(kind, 100)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        found = {window.tokens_ahead for _ in range(100_000)}
    finally:
        done.set()
        sender.join()
    assert found <= {100 * prompts for prompts in range(len(kinds) + 1)}
    assert window.tokens_ahead == 0
