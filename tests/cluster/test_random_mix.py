"""Random requests with all options, aborts and disconnects; afterwards all pages are free and no request is open.

The pool is small, so that requests queue, are retracted and share prefixes. Every chunk of KV is checksummed.
"""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import GreedyTokens, load_reference
from tests.cluster.servers import HTTP, Server, body, cluster


class Pair(NamedTuple):
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with cluster(tmp_path_factory.mktemp("mix")) as started:
        yield Pair(
            *started.pair(
                llama,
                ("--chunk-size", "32", "--kv-tokens", "1024", "--page-size", "8"),
                ("--kv-tokens", "320", "--growth-tokens", "4", "--max-running-requests", "8"),
            )
        )


REQUESTS = st.fixed_dictionaries(
    {
        "family": st.integers(0, 2),
        "length": st.integers(1, 90),
        "new_tokens": st.integers(1, 60),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([None, 5]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from([None, ["a", "qz"]]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
        "logprob_start_len": st.sampled_from([None, 0, 5]),
        "stream": st.booleans(),
        "priority": st.integers(-1, 1),
        "end": st.sampled_from(["read", "read", "read", "disconnect", "abort", "deadline"]),
        "patience_ms": st.integers(0, 150),
    }
)


def to_body(request: dict[str, Any], rid: str) -> dict[str, Any]:
    """Prompts of one family share a prefix."""
    draw = random.Random(request["family"])
    sampling = {
        "max_new_tokens": request["new_tokens"],
        "n": request["n"],
        "seed": 5,
        **{
            name: request[name]
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "ignore_eos")
        },
    }
    if request["top_k"] is not None:
        sampling["top_k"] = request["top_k"]
    if request["stop"] is not None:
        sampling["stop"] = request["stop"]
    result: dict[str, Any] = {
        "rid": rid,
        "input_ids": [draw.randrange(256) for _ in range(request["length"])],
        "sampling_params": sampling,
        "stream": request["stream"],
        "priority": request["priority"],
    }
    if request["logprobs"] is not None:
        result |= {"return_logprob": True, "top_logprobs_num": request["logprobs"]}
        if request["logprob_start_len"] is not None:
            result["logprob_start_len"] = min(request["logprob_start_len"], request["length"] - 1)
    if request["end"] == "deadline":
        result["timeout_s"] = 0.001 + request["patience_ms"] / 1000
    return result


ALLOWED = {200, 413, 429, 504}
"""Finished or aborted, too large for the pool, queue full, deadline."""


def send(server: Server, request: dict[str, Any], rid: str, wrong: list[str]) -> None:
    patience_s = request["patience_ms"] / 1000
    timeout = httpx.Timeout(patience_s or 0.001) if request["end"] == "disconnect" else httpx.Timeout(60)
    try:
        if request["end"] == "abort":
            threading.Timer(
                patience_s, HTTP.post, (f"{server.url}/abort_request",), {"json": {"rid": rid}, "timeout": 10}
            ).start()
        response = HTTP.post(f"{server.url}/generate", json=to_body(request, rid), timeout=timeout)
        if response.status_code not in ALLOWED:
            wrong.append(response.text)
    except httpx.TimeoutException:
        assert request["end"] == "disconnect"


def send_all(server: Server, requests: list[dict[str, Any]]) -> None:
    """Send all requests at once. Fails for a response that none of them should get."""
    prefix, wrong = f"{time.monotonic_ns()}", list[str]()
    clients = [
        threading.Thread(target=send, args=(server, request, f"{prefix}-{index}", wrong))
        for index, request in enumerate(requests)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(90)
        assert not client.is_alive()
    assert not wrong


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUESTS, min_size=10, max_size=16))
def test_random_requests_leave_both_servers_clean(pair: Pair, requests: list[dict[str, Any]]) -> None:
    send_all(pair.decode, requests)
    pair.prefill.check_clean()
    pair.decode.check_clean()


def test_pair_gives_correct_tokens_after_random_requests(pair: Pair, llama: Path) -> None:
    reference = load_reference(llama)
    for family in range(3):
        draw = random.Random(family)
        prompt = [draw.randrange(256) for _ in range(70)]
        answer = HTTP.post(f"{pair.decode.url}/generate", json=body(prompt, 20), timeout=60).json()
        assert answer["output_ids"] == GreedyTokens(reference, prompt, 20)
    counters = pair.decode.settled_info()["counters"]
    assert counters["checksum_errors"] == 0
    for event in ("retractions", "requests_aborted", "requests_finished", "prefix_tokens_reused"):
        assert counters[event] > 0, event
