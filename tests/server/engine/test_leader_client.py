"""The frontend's end of the socket to its leader, and its metrics, with a scripted leader."""

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from pdserve.common.errors import UnavailableError
from pdserve.common.sampling import SamplingParams
from pdserve.common.stuck import Watch
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Cancel, Failed, Submit, Tokens
from pdserve.server.engine.leader_client import BATCHES_PER_TURN, OVERDUE_S, LeaderClient
from pdserve.server.observability.metrics import INTER_TOKEN_BUCKETS_S, LATENCY_BUCKETS_S, Metrics
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import introduce, running_server, sse_events
from tests.server.scripted_leader import ScriptedLeader, make_finished, make_status


@pytest.fixture
async def pair() -> AsyncIterator[tuple[LeaderClient, ScriptedLeader]]:
    client = LeaderClient(Metrics(), DecodeConfig())
    leader = ScriptedLeader(client.address)
    receiving = asyncio.create_task(client.run())
    await introduce(leader, client)
    yield client, leader
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    leader.close()
    client.close()


async def test_message_that_arrives_during_a_send_is_received(pair: tuple[LeaderClient, ScriptedLeader]) -> None:
    """ZMQ's descriptor signals an arrival once, and a send may consume the signal."""
    client, leader = pair
    with client.open([Submit("r", (1,), SamplingParams())]) as inbox:
        await leader.expect(Submit)
        for token in range(20):
            await leader.send(Tokens("r", (token,)))
            time.sleep(0.01)
            client.flush_cache()
            (progress,) = await asyncio.wait_for(inbox.receive(), 2)
            assert progress.token_ids == [token]
        await leader.send(make_finished("r", 20))
        await inbox.receive()


async def test_socket_refuses_other_users() -> None:
    """All users of the machine can see the socket's name."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    client = LeaderClient(Metrics(), DecodeConfig())
    program = f"""
import os, zmq
os.setgid(65534), os.setuid(65534)
socket = zmq.Context().socket(zmq.PAIR)
monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.connect({client.address!r})
os._exit(bool(monitor.poll(500)))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await asyncio.wait_for(process.wait(), 20) == 0, "another user was able to connect"
    client.close()


async def test_frontend_that_has_fallen_behind_receives_everything_in_order(
    pair: tuple[LeaderClient, ScriptedLeader],
) -> None:
    client, leader = pair
    count = 2 * BATCHES_PER_TURN + 10
    taken: dict[str, list[int]] = {"a": [], "b": []}
    receives = ended = 0
    with client.open([Submit("a", (1,), SamplingParams(), more_rids=("b",))]) as inbox:
        await leader.expect(Submit)
        for token in range(count):
            await leader.send(Tokens("a", (token,)), Tokens("b", (-token,)))
        await leader.send(make_finished("a", count), make_finished("b", count))
        while ended < 2:
            receives += 1
            for progress in await asyncio.wait_for(inbox.receive(), 2):
                taken[progress.rid] += progress.token_ids
                ended += progress.terminal is not None
    assert taken == {"a": list(range(count)), "b": [-token for token in range(count)]}
    assert receives < count, "waiting tokens are received together"


@pytest.mark.parametrize("by", ["timeout_s", "request_timeout_s"])
async def test_request_fails_at_its_deadline_while_the_leader_hangs(tokenizer: Tokenizer, by: str) -> None:
    config = DecodeConfig(request_timeout_s=0.2 if by == "request_timeout_s" else 600.0)
    async with running_server(tokenizer, config) as server:
        body = {"text": "a", "rid": "r", **({"timeout_s": 0.2} if by == "timeout_s" else {})}
        before = time.monotonic()
        response = await server.http.post("/generate", json=body)
        assert time.monotonic() - before < 0.2 + OVERDUE_S + 3.0
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
        words = f"not finished within its deadline of 0.2 s ({by}); the leader process does not respond"
        assert response.json()["error"]["message"] == words
        await server.leader.expect(Submit)
        assert await server.leader.expect(Cancel) == Cancel("r")
        refused = await server.http.post("/generate", json=body)
        assert refused.status_code == 409, "the leader may still have it"
        await server.leader.send(Tokens("r", (1,)), Failed("r", 499, "aborted", "late"))  # the leader continues
        await server.report()
        again = asyncio.create_task(server.http.post("/generate", json={"text": "a", "rid": "r"}))
        await server.leader.expect(Submit)
        await server.leader.send(Tokens("r", (104,)), make_finished("r", 1))
        assert (await again).json()["text"] == "h"


async def test_stream_ends_at_its_deadline_while_the_leader_hangs(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer) as server:
        body = {"text": "a", "stream": True, "timeout_s": 0.3, "sampling_params": {"n": 2}}
        streaming = asyncio.create_task(server.http.post("/generate", json=body))
        submit = await server.leader.expect(Submit)
        await server.leader.send(Tokens(submit.rid, (104,)))
        *_, first, second, done = sse_events((await streaming).text)
        assert done == "[DONE]"
        assert [event["error"]["code"] for event in (first, second)] == ["deadline"] * 2  # type: ignore[index]


async def test_deadline_timer_is_cancelled_when_the_request_ends(pair: tuple[LeaderClient, ScriptedLeader]) -> None:
    client, leader = pair
    with client.open([Submit("r", (1,), SamplingParams(), timeout_s=60)]) as inbox:
        (timer,) = [entry.overdue for entry in client._open.values()]
        await leader.expect(Submit)
        await leader.send(make_finished("r", 1))
        await inbox.receive()
    assert timer is not None
    assert timer.cancelled()


async def test_prompts_of_a_call_follow_the_first(pair: tuple[LeaderClient, ScriptedLeader]) -> None:
    """Each later prompt names the first one in `follows`, so that the leader accepts all of them or none."""
    client, leader = pair
    with client.open([Submit(rid, (1,), SamplingParams()) for rid in "abc"]):
        found = [await leader.expect(Submit) for _ in range(3)]
    assert [(submit.rid, submit.follows) for submit in found] == [("a", None), ("b", "a"), ("c", "a")]


def test_token_metrics_equal_those_of_prometheus_client() -> None:
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
    assert _samples(metrics.render("")) >= _samples(generate_latest(registry)) > set()


def _samples(exposition: bytes) -> set[str]:
    """The samples, rounded to nine digits: sums depend on the order of addition."""
    found = set()
    for line in exposition.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and "_created" not in name:
            found.add(f"{name} {float(value):.9g}")
    return found


async def test_silent_leader_is_named_and_refuses_requests_until_it_reports_again() -> None:
    now = 100.0
    watch = Watch(lambda: now)
    client = LeaderClient(Metrics(), DecodeConfig(), watch=watch)
    leader = ScriptedLeader(client.address)
    receiving = asyncio.create_task(client.run())
    try:
        await introduce(leader, client)
        for _ in range(20):
            now += 0.25
            watch.check()
        assert client.problems() == []
        client._status_at -= 4.5
        (problem,) = client.problems()
        assert problem.startswith("the leader process has sent nothing for ")
        with pytest.raises(UnavailableError, match="the leader process has sent nothing"):
            client.check_healthy()
        await leader.send(make_status())
        while client.problems():
            await asyncio.sleep(0.01)
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        leader.close()
        client.close()
