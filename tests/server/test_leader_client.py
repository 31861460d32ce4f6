"""The front's end of the socket to its leader, and what it counts, with a scripted leader on the other end."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from pdserve.configs.sampling import SamplingParams
from pdserve.scheduler.front import Submit, Tokens
from pdserve.server.leader_client import BATCHES_PER_TURN, LeaderClient
from pdserve.server.metrics import INTER_TOKEN_BUCKETS_S, LATENCY_BUCKETS_S, Metrics
from tests.server.http_harness import introduce
from tests.server.scripted_leader import ScriptedLeader, make_finished


@pytest.fixture
async def pair() -> AsyncIterator[tuple[LeaderClient, ScriptedLeader]]:
    client = LeaderClient(Metrics())
    leader = ScriptedLeader(client.address)
    receiving = asyncio.create_task(client.run())
    await introduce(leader, client)
    yield client, leader
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    leader.close()
    client.close()


async def test_what_comes_while_something_is_sent_is_not_left_lying(pair: tuple[LeaderClient, ScriptedLeader]) -> None:
    """ZMQ's descriptor tells of it once, and whoever sends takes that notice away."""
    client, leader = pair
    inbox = client.open([Submit("r", (1,), SamplingParams())])
    await leader.expect(Submit)
    for token in range(20):
        await leader.send(Tokens("r", (token,)))
        time.sleep(0.01)
        client.flush_cache()
        (progress,) = await asyncio.wait_for(inbox.receive(), 2)
        assert progress.token_ids == [token]
    await leader.send(make_finished("r", 20))
    await inbox.receive()
    inbox.close()


async def test_a_front_that_has_fallen_behind_takes_everything_in_order(
    pair: tuple[LeaderClient, ScriptedLeader],
) -> None:
    client, leader = pair
    inbox = client.open([Submit("a", (1,), SamplingParams(), more_rids=("b",))])
    await leader.expect(Submit)
    count = 2 * BATCHES_PER_TURN + 10
    for token in range(count):
        await leader.send(Tokens("a", (token,)), Tokens("b", (-token,)))
    await leader.send(make_finished("a", count), make_finished("b", count))
    taken: dict[str, list[int]] = {"a": [], "b": []}
    looks = ended = 0
    while ended < 2:
        looks += 1
        for progress in await asyncio.wait_for(inbox.receive(), 2):
            taken[progress.rid] += progress.token_ids
            ended += progress.terminal is not None
    inbox.close()
    assert taken == {"a": list(range(count)), "b": [-token for token in range(count)]}
    assert looks < count, "tokens that wait are taken together"


async def test_the_prompts_of_a_call_say_that_they_belong_together(pair: tuple[LeaderClient, ScriptedLeader]) -> None:
    """So that the leader lets all of them in or none. They follow one another."""
    client, leader = pair
    with client.open([Submit(rid, (1,), SamplingParams()) for rid in "abc"]):
        found = [await leader.expect(Submit) for _ in range(3)]
    assert [(submit.rid, submit.follows) for submit in found] == [("a", None), ("b", "a"), ("c", "a")]


def test_tokens_are_counted_as_prometheus_does() -> None:
    registry = CollectorRegistry()
    first = Histogram("pdserve_time_to_first_token_seconds", "", buckets=LATENCY_BUCKETS_S, registry=registry)
    between = Histogram("pdserve_inter_token_latency_seconds", "", buckets=INTER_TOKEN_BUCKETS_S, registry=registry)
    tokens = Counter("pdserve_generation_tokens", "", registry=registry)
    metrics, numbers = Metrics(), random.Random(1)
    metrics.tokens_arrived(3, opened_at=1.0, last_token_at=None, now=1.5)
    first.observe(0.5)
    between.observe(0.0)
    between.observe(0.0)
    tokens.inc(3)
    for bound in (*INTER_TOKEN_BUCKETS_S, 0.0, 7.0, *(numbers.expovariate(20.0) for _ in range(500))):
        count = numbers.choice((0, 1, 1, 1, 2, 5))
        metrics.tokens_arrived(count, opened_at=0.0, last_token_at=0.0, now=bound * count)
        for _ in range(count):
            between.observe(bound * count / count)
        tokens.inc(count)
    assert _samples(metrics.render("")[0]) >= _samples(generate_latest(registry)) > set()


def _samples(exposition: bytes) -> set[str]:
    """Lines of values; sums to nine digits, as they depend on the order of adding."""
    found = set()
    for line in exposition.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and "_created" not in name:
            found.add(f"{name} {float(value):.9g}")
    return found
