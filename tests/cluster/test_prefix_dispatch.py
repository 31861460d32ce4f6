"""Two prefill servers: each turn of a conversation goes to the server that has its prefix. KV events of both roles."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, load_reference
from tests.cluster.servers import HTTP, Server, cluster, wait_until
from tests.ports import free_ports
from tests.scheduler.engine.kv_event_subscribers import Follower

PAGE = 8
NEW_TOKENS = 4
CONVERSATIONS = 4


class Servers(NamedTuple):
    """Pages of the two prefill servers differ in size, also from those of decode."""

    prefills: tuple[Server, Server]
    decode: Server
    events: dict[str, int]
    """The ports of KV events, by role."""


@pytest.fixture(scope="module")
def started(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    events = {"prefill": free_ports(2), "decode": free_ports(2)}
    sizes = ("--kv-tokens", "8192")
    with cluster(tmp_path_factory.mktemp("dispatch")) as servers:
        first = servers.add("prefill", llama, "--page-size", "4", "--kv-events-port", str(events["prefill"]), *sizes)
        second = servers.add("prefill", llama, "--page-size", "16", *sizes)
        endpoints = ("--prefill", f"{first.endpoint},{second.endpoint}", "--page-size", str(PAGE), *sizes)
        topic = ("--kv-events-port", str(events["decode"]), "--kv-events-topic", "kv@decode")
        decode = servers.add("decode", llama, *endpoints, *topic)
        for server, peers in ((first, 1), (second, 1), (decode, 2)):
            server.wait_ready(peers=peers)
        yield Servers((first, second), decode, events)
        for server in servers.servers:
            server.check_clean()


def caches_are_reported(decode: Server) -> bool:
    return all(peer["cached_tokens"] is not None for peer in decode.info()["peers"])


def test_conversations_stay_on_the_server_that_has_their_prefix(started: Servers, llama: Path) -> None:
    decode, reference, draw = started.decode, load_reference(llama), random.Random(4)
    wait_until(lambda: caches_are_reported(decode), 30, "reports of both caches")
    histories = [draw.choices(range(VOCAB_SIZE), k=48) for _ in range(CONVERSATIONS)]
    for turn in range(3):
        for number, history in enumerate(histories):
            history += draw.choices(range(VOCAB_SIZE), k=20)
            reply = decode.post(history, NEW_TOKENS).json()
            assert reply["output_ids"] == GreedyTokens(reference, history, NEW_TOKENS)
            if turn:
                assert reply["meta_info"]["cached_tokens"] >= len(history) - 20 - NEW_TOKENS - 16, number
            history += reply["output_ids"]
    requests = [server.count("requests") for server in started.prefills]
    assert min(requests) >= 3, f"one of the servers has nearly all conversations: {requests}"
    info = decode.settled_info()
    counters = info["counters"]
    assert counters["dispatch_prefix"] == 2 * CONVERSATIONS
    assert counters["dispatch_load"] == CONVERSATIONS
    assert counters["dispatch_tokens_reused"] == counters["dispatch_tokens_expected"] > 0
    assert {"tokens_ahead", "cached_tokens"} <= info["peers"][0].keys()


@pytest.mark.parametrize(("role", "page_size"), [("prefill", 4), ("decode", PAGE)])
def test_kv_events_report_cached_and_flushed_blocks(started: Servers, role: str, page_size: int) -> None:
    server = started.prefills[0] if role == "prefill" else started.decode
    prompt = random.Random(6).choices(range(VOCAB_SIZE), k=3 * PAGE)
    if role == "prefill":
        started.decode.post(prompt, NEW_TOKENS, **server.bootstrap).raise_for_status()
    else:
        server.generate(prompt, NEW_TOKENS)
    port = started.events[role]
    with Follower(port, port + 1, b"kv@decode" if role == "decode" else b"", page_size=page_size) as follower:
        follower.follow(lambda: follower.cached_tokens(tuple(prompt)) == len(prompt))
        HTTP.post(f"{server.url}/flush_cache", timeout=5).raise_for_status()
        follower.follow(lambda: not follower.blocks)
        assert follower.media == {"GPU"}
