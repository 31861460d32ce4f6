"""The circuit breaker of the KV store."""

from pdserve.scheduler.store.breaker import FIRST_WAIT_S, LONGEST_WAIT_S, Breaker


def connected() -> Breaker:
    breaker = Breaker()
    assert breaker.take_ping(0.0)
    assert breaker.pinged(None, 0.0)
    return breaker


def test_store_is_not_used_before_the_first_ping_has_succeeded() -> None:
    breaker = Breaker()
    assert not breaker.closed
    assert breaker.take_ping(0.0)
    assert not breaker.take_ping(0.0)  # one at a time
    assert not breaker.pinged("no server answers", 1.0)
    assert breaker.problem == "no server answers"


def test_failure_opens_it_until_a_ping_succeeds() -> None:
    breaker = connected()
    assert breaker.closed
    assert not breaker.take_ping(5.0)
    assert breaker.failed("gone", 5.0)
    assert not breaker.failed("still gone", 5.0)  # of a load that was in flight
    assert not breaker.closed
    assert not breaker.take_ping(5.0)
    assert breaker.take_ping(5.0 + FIRST_WAIT_S)
    assert breaker.pinged(None, 6.0)
    assert breaker.closed


def test_pings_become_rarer() -> None:
    breaker, now, waits = connected(), 0.0, []
    breaker.failed("gone", now)
    for _ in range(8):
        start = now
        while not breaker.take_ping(now):
            now += 0.5
        waits.append(now - start)
        breaker.pinged("gone", now)
    assert waits == [1, 1, 2, 4, *[LONGEST_WAIT_S] * 4]
