"""A prompt whose transfer is lost is sent once more; what its client is told when that is lost as well."""

import pytest

from tests.scheduler.simulation.simulator import Simulator


def send(simulator: Simulator) -> None:
    """Have it sent to the one prefill server there is, which begins to write."""
    simulator.start("a:1")
    for _ in range(4):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
        simulator.check()
    assert simulator.decode.state_counts()["prefilling"] == 1
    assert any(server.writes for server in simulator.servers.values())


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_lost_twice_may_be_asked_for_again(lost: bool) -> None:
    """Whether a server was lost or its writes have failed: prefill has not said that it would never work."""
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


def test_a_transfer_that_nobody_waits_for_has_not_failed() -> None:
    """Prefill gives up what decode has given up: that is no sign of trouble."""
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
    """Have the one prefill server there is write everything and say so; decode's ranks have yet to compare it."""
    simulator.kill(1)
    simulator.submit(6, 0, 4, 1, None, 0)
    for _ in range(12):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
        simulator.end_write(0, ok=True, late=False)
        simulator.deliver(0, up=True)
        simulator.check()
    assert simulator.decode.state_counts()["prefilling"] == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_server_that_goes_after_its_last_word_is_not_missed(comes_back: bool) -> None:
    """Decode's ranks compare what has landed, and nobody writes any more: there is nothing to wait for or to repeat."""
    simulator = Simulator(verifies=True)
    send_all(simulator)
    if comes_back:
        simulator.hang(0)
        simulator.wake(0, lost_us=True)
    else:
        simulator.kill(0)
    simulator.rank_turn(eos=False)
    assert [peer.window.own_tokens for peer in simulator.decode.dispatcher.peers._peers.values()] == [0] * comes_back
    for _ in range(12):
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        simulator.check()
    assert simulator.decode.counters["requests_finished"] == 1
    assert (simulator.decode.counters["redispatches"], simulator.decode.dispatcher.quarantine.pages) == (0, 0)
    simulator.finish()


@pytest.mark.parametrize("killed", [False, True])
def test_a_client_that_goes_after_the_last_word_leaves_no_fence_behind(killed: bool) -> None:
    """Prefill is not told: it has stopped. If its connection ends before the fence is there, it cannot end it."""
    simulator = Simulator(verifies=True)
    send_all(simulator)
    (server,) = simulator.servers.values()
    if killed:
        simulator.kill(0)
    simulator.cancel(0, stopped=False)
    assert not server.to_prefill
    assert simulator.decode.dispatcher.quarantine.pages > 0
    simulator.decode_turn()
    assert simulator.decode.dispatcher.quarantine.pages == 0
    simulator.rank_turn(eos=False)
    simulator.finish()


def pass_turns(simulator: Simulator, seconds: float) -> None:
    """Everybody works, a hundred times a second."""
    for _ in range(round(seconds * 100)):
        simulator.pass_time(0.01)
        simulator.work()
        simulator.check()


def test_a_rolling_restart_of_prefill_loses_nobody() -> None:
    """What a server that shuts down refuses waits for the one that takes its place, and counts as no attempt."""
    simulator = Simulator()
    simulator.kill(1)
    simulator.drain(0)
    simulator.submit(6, 0, 4, 1, None, 0)
    pass_turns(simulator, 2.5)
    (request,) = simulator.decode.requests.values()
    assert request.prompt.times_refused == 1, "one that is shutting down is not asked again"
    assert not simulator.failures
    simulator.kill(0)
    simulator.start("a:1")
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["requests_finished"] == 1
    simulator.finish()


def test_another_server_is_asked_at_once() -> None:
    simulator = Simulator()
    simulator.drain(0)
    for _ in range(3):
        simulator.submit(6, 0, 2, 1, None, 0)
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["redispatches"] >= 1
    assert simulator.decode.counters["requests_finished"] == 3
    simulator.finish()


def test_one_that_nobody_takes_hears_why() -> None:
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


def test_the_retry_is_not_spent_on_a_server_that_is_about_to_end() -> None:
    """It has lost a rank, its frontend or its time to drain: it fails what it has, and ends a moment later."""
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
    assert simulator.decode.counters["redispatches"] == 1, "put back into the queue, and not taken out"
    simulator.kill(0)
    pass_turns(simulator, 1.0)
    assert not simulator.failures
    simulator.start("a:1")
    pass_turns(simulator, 0.3)
    assert simulator.decode.counters["requests_finished"] == 1
    simulator.finish()


def test_a_server_that_says_that_it_takes_no_more_gets_none() -> None:
    """Also before it has refused one: its heartbeats say so."""
    simulator = Simulator()
    instances = list(simulator.servers)
    simulator.drain(0)
    for instance, server in simulator.servers.items():
        load = server.scheduler.load()
        simulator.decode.peer_load(instance, load)
        if not load.accepting:
            simulator.decode.peer_leaving(instance, simulator.now)
    for _ in range(3):
        simulator.submit(6, 0, 2, 1, None, 0)
    pass_turns(simulator, 0.5)
    assert simulator.decode.counters["requests_finished"] == 3
    assert simulator.decode.counters["redispatches"] == 0
    assert simulator.servers[instances[0]].scheduler.counters["requests"] == 0
    simulator.finish()
