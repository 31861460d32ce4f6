"""Retries: a prompt whose transfer fails is sent once more; then the client gets an error."""

import pytest

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.messages.ranks import KvVerified, VerifyKv
from pdserve.transfer.control.events import LoadReported
from tests.scheduler.simulation.simulator import Simulator


def send(simulator: Simulator) -> None:
    """Dispatch the prompt to the only prefill server, which begins to write."""
    simulator.start("a:1")
    for _ in range(4):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
        simulator.check()
    assert simulator.decode.state_counts()["prefilling"] == 1
    assert any(server.writes for server in simulator.servers.values())


@pytest.mark.parametrize("lost", [False, True])
def test_request_that_fails_twice_may_be_retried_by_the_client(lost: bool) -> None:
    """Whether a server was lost or its writes have failed: another attempt may succeed."""
    simulator = Simulator()
    simulator.kill(1)
    simulator.submit(6, 0, 4, 1, None, 0)
    for attempt in range(2):
        assert simulator.decode.counters["redispatches"] == attempt
        send(simulator)
        if lost:
            simulator.kill(0)
        while simulator.servers and simulator.decode.state_counts()["prefilling"]:
            simulator.end_write(0, ok=False, late=False)
            simulator.deliver(0, up=True)
        simulator.check()
    (failed,) = simulator.failures.values()
    assert (failed.status, failed.code, failed.retry_after_s) == (503, "unavailable", 1)
    why = "prefill server lost: killed" if lost else "injected"
    assert failed.message == f"failed after 2 attempts: {why}"
    simulator.finish()


def test_failed_transfer_of_an_ended_request_is_not_counted() -> None:
    """The transfer fails on prefill after decode has given it up: that is no error."""
    simulator = Simulator()
    simulator.kill(1)
    simulator.submit(6, 0, 4, 1, None, 0)
    send(simulator)
    (server,) = simulator.servers.values()
    while server.writes:
        simulator.end_write(0, ok=False, late=False)
    simulator.cancel(0, stopped=False)
    while server.to_decode:
        simulator.deliver(0, up=True)
    simulator.check()
    assert (simulator.decode.counters["transfers_failed"], simulator.decode.counters["stale_messages"]) == (0, 1)
    simulator.finish()


def send_all(simulator: Simulator) -> None:
    """The only prefill server writes everything and sends PrefillDone; decode's ranks have not verified it yet."""
    simulator.kill(1)
    simulator.submit(6, 0, 4, 1, None, 0)
    for _ in range(12):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
        simulator.end_write(0, ok=True, late=False)
        simulator.deliver(0, up=True)
        simulator.check()
    assert simulator.decode.state_counts()["verifying"] == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_loss_of_prefill_after_prefill_done_is_harmless(comes_back: bool) -> None:
    """Decode's ranks verify the KV, and no writer is left: no wait and no retry."""
    simulator = Simulator(verifies=True)
    send_all(simulator)
    if comes_back:
        simulator.hang(0)
        simulator.wake(0, lost_us=True)
    else:
        simulator.kill(0)
    simulator.rank_turn(eos=False)
    assert [peer.window.own_tokens for peer in simulator.decode.peers._peers.values()] == [0] * comes_back
    for _ in range(12):
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        simulator.check()
    assert simulator.decode.counters["requests_finished"] == 1
    assert (simulator.decode.counters["redispatches"], simulator.decode.memory.holds.quarantined_pages) == (0, 0)
    simulator.finish()


@pytest.mark.parametrize("killed", [False, True])
def test_abort_after_prefill_done_leaves_nothing_in_quarantine(killed: bool) -> None:
    """Prefill gets no Abort: it has stopped. Its connection may close before the pages are quarantined, which would
    leave them there.
    """
    simulator = Simulator(verifies=True)
    send_all(simulator)
    (server,) = simulator.servers.values()
    if killed:
        simulator.kill(0)
    simulator.cancel(0, stopped=False)
    assert not server.to_prefill
    assert simulator.decode.memory.holds.quarantined_pages > 0
    simulator.decode_turn()
    assert simulator.decode.memory.holds.quarantined_pages == 0
    simulator.rank_turn(eos=False)
    simulator.finish()


def test_server_is_busy_while_ranks_verify_a_prompt_that_nobody_waits_for() -> None:
    simulator = Simulator(verifies=True)
    send_all(simulator)
    simulator.cancel(0, stopped=False)
    simulator.decode_turn()
    assert not simulator.decode.requests
    assert not simulator.decode.idle
    simulator.check()
    simulator.rank_turn(eos=False)
    assert simulator.decode.idle
    simulator.finish()


def test_transfer_with_a_difference_is_sent_again() -> None:
    simulator = Simulator(verifies=True)
    send_all(simulator)
    verify = simulator.commands.popleft()
    assert isinstance(verify, VerifyKv)
    simulator.decode.handle(KvVerified(0, verify.key, 1, "chunk 0 differs"), simulator.now)
    counters, holds = simulator.decode.counters, simulator.decode.memory.holds
    assert (counters["checksum_errors"], counters["transfers_failed"]) == (1, 1)
    assert holds.quarantined_pages > 0, "late writes may land"
    simulator.check()
    pass_turns(simulator, 2.5)
    assert (counters["requests_finished"], counters["checksum_errors"]) == (1, 1)
    simulator.finish()


def pass_turns(simulator: Simulator, seconds: float) -> None:
    """Run all servers, a hundred turns per second."""
    for _ in range(round(seconds * 100)):
        simulator.pass_time(0.01)
        simulator.work()
        simulator.check()


def test_rolling_restart_of_prefill_fails_no_request() -> None:
    """A prompt that a server refuses while it shuts down waits for its successor; the refusal is not an attempt."""
    simulator = Simulator()
    simulator.kill(1)
    simulator.drain(0)
    simulator.submit(6, 0, 4, 1, None, 0)
    pass_turns(simulator, 2.5)
    (request,) = simulator.decode.requests.values()
    assert request.prompt.times_refused == 1, "a server that shuts down gets no second prompt"
    assert not simulator.failures
    simulator.kill(0)
    simulator.start("a:1")
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["requests_finished"] == 1
    simulator.finish()


def test_refused_prompt_is_sent_to_another_server_at_once() -> None:
    simulator = Simulator()
    simulator.drain(0)
    for _ in range(3):
        simulator.submit(6, 0, 2, 1, None, 0)
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["redispatches"] >= 1
    assert simulator.decode.counters["requests_finished"] == 3
    simulator.finish()


def test_prompt_refused_by_all_servers_fails_with_the_reason() -> None:
    simulator = Simulator()
    simulator.kill(1)
    simulator.drain(0)
    simulator.submit(6, 0, 4, 1, None, 0)
    pass_turns(simulator, 2.9)
    assert not simulator.failures
    pass_turns(simulator, 0.3)
    (failed,) = simulator.failures.values()
    assert (failed.status, failed.retry_after_s) == (503, 1)
    assert failed.message == (
        "no prefill server is paired; waited 3 s (prefill_wait_s): the prefill server is shutting down"
    )
    simulator.finish()


def test_retry_is_not_sent_to_a_server_that_shuts_down() -> None:
    """A server that lost a rank or its frontend, or whose drain has ended, fails its requests and then exits."""
    simulator = Simulator()
    simulator.kill(1)
    simulator.submit(6, 0, 4, 1, None, 0)
    send(simulator)
    (server,) = simulator.servers.values()
    server.scheduler.stop_accepting()
    server.scheduler.fail_all("the server lost a rank", simulator.now)
    simulator.act()
    while server.writes:
        simulator.end_write(0, ok=False, late=False)
    while server.to_decode:
        simulator.deliver(0, up=True)
    pass_turns(simulator, 1.0)
    assert simulator.decode.state_counts()["queued"] == 1
    assert simulator.decode.counters["redispatches"] == 1, "queued again, and not dispatched"
    simulator.kill(0)
    pass_turns(simulator, 1.0)
    assert not simulator.failures
    simulator.start("a:1")
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["requests_finished"] == 1
    simulator.finish()


def test_server_that_does_not_accept_gets_no_prompts() -> None:
    """Also before it has refused one: its heartbeats have `accepting` = False."""
    simulator = Simulator()
    instances = list(simulator.servers)
    simulator.drain(0)
    for instance, server in simulator.servers.items():
        simulator.decode.handle(LoadReported(instance, server.scheduler.load()), simulator.now)
    for _ in range(3):
        simulator.submit(6, 0, 2, 1, None, 0)
    pass_turns(simulator, 0.5)
    assert simulator.decode.counters["requests_finished"] == 3
    assert simulator.decode.counters["redispatches"] == 0
    assert simulator.servers[instances[0]].scheduler.counters["requests"] == 0
    simulator.finish()


@pytest.mark.parametrize(
    ("rules", "grammar", "local_prefill", "computed_here"),
    [
        (0, Grammar("json_schema", "{}"), "auto", True),
        (0, Grammar("structural_tag", "{}"), "auto", True),
        (0, Grammar("json_schema", "{}"), "never", False),
        (0, Grammar("regex", "a"), "auto", False),
        (0, None, "auto", False),
        (1, Grammar("json_schema", "{}"), "auto", False),
    ],
    ids=["json", "tag", "never_here", "regex", "free", "same_rules"],
)
def test_prompt_is_computed_here_after_a_prefill_server_with_other_grammars_of_json(
    monkeypatch: pytest.MonkeyPatch,
    rules: int,
    grammar: Grammar | None,
    local_prefill: LocalPrefillSetting,
    computed_here: bool,
) -> None:
    """An older prefill server may sample a first token that the grammar refuses here."""
    monkeypatch.setattr("pdserve.scheduler.prefill.transitions.JSON_RULES", rules)
    simulator = Simulator(local_prefill=local_prefill)
    simulator.start("a:1")
    simulator.submitted.add("x")
    sampling = SamplingParams(max_new_tokens=4, grammar=grammar)
    simulator.decode.handle(Submit("x", tuple(range(10, 16)), sampling), simulator.now)
    simulator.act()
    simulator.finish()
    assert simulator.failures == {}
    counters = simulator.decode.counters
    assert (counters["requests_finished"], counters["transfers_failed"]) == (1, computed_here)
    assert counters["redispatches"] == computed_here
