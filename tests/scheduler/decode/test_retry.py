"""A prompt whose transfer is lost is sent once more; what its client is told when that is lost as well."""

import pytest

from tests.scheduler.simulation.simulator import World


def send(world: World) -> None:
    """Have it sent to the one prefill server there is, which begins to write."""
    world.start("a:1")
    for _ in range(4):
        world.decode_turn()
        world.deliver(0, up=False)
        world.prefill_turn(0)
        world.check()
    assert world.decode.state_counts()["prefilling"] == 1
    assert any(server.writes for server in world.servers.values())


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_lost_twice_may_be_asked_for_again(lost: bool) -> None:
    """Whether a server was lost or its writes have failed: prefill has not said that it would never work."""
    world = World()
    world.kill(1)
    world.submit(6, 0, 4, 1, None, 0)
    for attempt in range(2):
        assert world.decode.counters["redispatches"] == attempt
        send(world)
        if lost:
            world.kill(0)
        while world.servers and world.decode.state_counts()["prefilling"]:
            world.end_write(0, ok=False, late=False)
            world.deliver(0, up=True)
        world.check()
    (failed,) = world.failures.values()
    assert (failed.status, failed.code, failed.retry_after_s) == (503, "unavailable", 1)
    why = "prefill server lost: killed" if lost else "injected"
    assert failed.message == f"failed after 2 attempts: {why}"
    world.finish()


def test_a_transfer_that_nobody_waits_for_has_not_failed() -> None:
    """Prefill gives up what decode has given up: that is no sign of trouble."""
    world = World()
    world.kill(1)
    world.submit(6, 0, 4, 1, None, 0)
    send(world)
    (server,) = world.servers.values()
    while server.writes:
        world.end_write(0, ok=False, late=False)
    world.cancel(0, stopped=False)
    while server.to_decode:
        world.deliver(0, up=True)
    world.check()
    assert (world.decode.counters["transfers_failed"], world.decode.counters["stale_messages"]) == (0, 1)
    world.finish()


def send_all(world: World) -> None:
    """Have the one prefill server there is write everything and say so; decode's ranks have yet to compare it."""
    world.kill(1)
    world.submit(6, 0, 4, 1, None, 0)
    for _ in range(12):
        world.decode_turn()
        world.deliver(0, up=False)
        world.prefill_turn(0)
        world.end_write(0, ok=True, late=False)
        world.deliver(0, up=True)
        world.check()
    assert world.decode.state_counts()["prefilling"] == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_server_that_goes_after_its_last_word_is_not_missed(comes_back: bool) -> None:
    """Decode's ranks compare what has landed, and nobody writes any more: there is nothing to wait for or to repeat."""
    world = World(verifies=True)
    send_all(world)
    if comes_back:
        world.hang(0)
        world.wake(0, lost_us=True)
    else:
        world.kill(0)
    world.rank_turn(eos=False)
    assert [peer.window.own_tokens for peer in world.decode.intake.peers._peers.values()] == [0] * comes_back
    for _ in range(12):
        world.decode_turn()
        world.rank_turn(eos=False)
        world.check()
    assert world.decode.counters["requests_finished"] == 1
    assert (world.decode.counters["redispatches"], world.decode.intake.fences.pages) == (0, 0)
    world.finish()


@pytest.mark.parametrize("killed", [False, True])
def test_a_client_that_goes_after_the_last_word_leaves_no_fence_behind(killed: bool) -> None:
    """Prefill is not told: it has stopped. If its connection ends before the fence is there, it cannot end it."""
    world = World(verifies=True)
    send_all(world)
    (server,) = world.servers.values()
    if killed:
        world.kill(0)
    world.cancel(0, stopped=False)
    assert not server.to_prefill
    assert world.decode.intake.fences.pages > 0
    world.decode_turn()
    assert world.decode.intake.fences.pages == 0
    world.rank_turn(eos=False)
    world.finish()


def pass_turns(world: World, seconds: float) -> None:
    """Everybody works, a hundred times a second."""
    for _ in range(round(seconds * 100)):
        world.pass_time(0.01)
        world.work()
        world.check()


def test_a_rolling_restart_of_prefill_loses_nobody() -> None:
    """What a server that shuts down refuses waits for the one that takes its place, and counts as no attempt."""
    world = World()
    world.kill(1)
    world.drain(0)
    world.submit(6, 0, 4, 1, None, 0)
    pass_turns(world, 2.5)
    (request,) = world.decode.requests.values()
    assert request.prompt.times_refused == 1, "one that is shutting down is not asked again"
    assert not world.failures
    world.kill(0)
    world.start("a:1")
    pass_turns(world, 0.3)
    assert world.decode.counters["requests_finished"] == 1
    world.finish()


def test_another_server_is_asked_at_once() -> None:
    world = World()
    world.drain(0)
    for _ in range(3):
        world.submit(6, 0, 2, 1, None, 0)
    pass_turns(world, 0.3)
    assert world.decode.counters["redispatches"] >= 1
    assert world.decode.counters["requests_finished"] == 3
    world.finish()


def test_one_that_nobody_takes_hears_why() -> None:
    world = World()
    world.kill(1)
    world.drain(0)
    world.submit(6, 0, 4, 1, None, 0)
    pass_turns(world, 2.9)
    assert not world.failures
    pass_turns(world, 0.3)
    (failed,) = world.failures.values()
    assert (failed.status, failed.retry_after_s) == (503, 1)
    assert failed.message == (
        "no prefill server is paired; waited 3 s (prefill_wait_s): the prefill server is shutting down"
    )
    world.finish()


def test_the_retry_is_not_spent_on_a_server_that_is_about_to_end() -> None:
    """It has lost a rank, its frontend or its time to drain: it fails what it has, and ends a moment later."""
    world = World()
    world.kill(1)
    world.submit(6, 0, 4, 1, None, 0)
    send(world)
    (server,) = world.servers.values()
    server.scheduler.stop_accepting()
    server.scheduler.fail_all("the server lost a rank", world.now)
    world.act()
    while server.writes:
        world.end_write(0, ok=False, late=False)
    while server.to_decode:
        world.deliver(0, up=True)
    pass_turns(world, 1.0)
    assert world.decode.state_counts()["queued"] == 1
    assert world.decode.counters["redispatches"] == 1, "put back into the queue, and not taken out"
    world.kill(0)
    pass_turns(world, 1.0)
    assert not world.failures
    world.start("a:1")
    pass_turns(world, 0.3)
    assert world.decode.counters["requests_finished"] == 1
    world.finish()


def test_a_server_that_says_that_it_takes_no_more_gets_none() -> None:
    """Also before it has refused one: its heartbeats say so."""
    world = World()
    instances = list(world.servers)
    world.drain(0)
    for instance, server in world.servers.items():
        load = server.scheduler.load()
        world.decode.peer_load(instance, load)
        if not load.accepting:
            world.decode.peer_leaving(instance, world.now)
    for _ in range(3):
        world.submit(6, 0, 2, 1, None, 0)
    pass_turns(world, 0.5)
    assert world.decode.counters["requests_finished"] == 3
    assert world.decode.counters["redispatches"] == 0
    assert world.servers[instances[0]].scheduler.counters["requests"] == 0
    world.finish()
