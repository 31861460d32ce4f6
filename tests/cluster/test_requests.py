"""Requests and load on a real pair: samples, prefix cache, log-probabilities, full pools and queues, priorities."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoints import GreedyTokens, is_reference_greedy, load_reference, reference_logits
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until

PAGE = 16


class Pair(NamedTuple):
    prefill: Server
    decode: Server
    reference: Any

    def post(self, **request: Any) -> Any:
        """The JSON response of /generate."""
        return HTTP.post(f"{self.decode.url}/generate", json=request, timeout=60).raise_for_status().json()


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with cluster(tmp_path_factory.mktemp("requests")) as started:
        prefill, decode = started.pair(
            llama, ("--chunk-size", "64", "--kv-tokens", "8192"), ("--kv-tokens", "8192", "--max-queued-requests", "64")
        )
        yield Pair(prefill, decode, load_reference(llama))
        prefill.check_clean()
        decode.check_clean()


class Source(NamedTuple):
    """A prefill server that several decode servers use."""

    servers: Cluster
    prefill: Server

    def decode(self, *flags: str) -> Server:
        server = self.servers.add("decode", self.prefill.model, "--prefill", self.prefill.endpoint, *flags)
        return server.wait_ready(peers=1)

    def end(self, decode: Server) -> None:
        """Check that both servers are clean, and stop decode."""
        self.prefill.check_clean()
        decode.check_clean()
        assert decode.stop() == 0


@pytest.fixture(scope="module")
def source(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with cluster(tmp_path_factory.mktemp("source")) as started:
        yield Source(started, started.add("prefill", llama, "--kv-tokens", "4096").wait_ready())


def test_samples_equal_single_requests_and_share_one_transfer(pair: Pair) -> None:
    prompt = prompt_of(37, seed=1)
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    singles = [
        pair.post(input_ids=prompt, sampling_params={**sampling, "seed": 100 + index})["output_ids"]
        for index in range(4)
    ]
    assert len({tuple(tokens) for tokens in singles}) > 1, "all seeds gave the same sample"
    before = pair.decode.count("transfers")
    samples = pair.post(input_ids=prompt, sampling_params={**sampling, "seed": 100, "n": 4})
    assert [sample["output_ids"] for sample in samples] == singles
    assert pair.decode.count("transfers") == before + 1


def test_second_request_with_the_same_prefix_transfers_only_new_pages(pair: Pair) -> None:
    """Prefill computes only new tokens and transfers only pages that decode does not have."""
    shared = prompt_of(10 * PAGE, seed=2)
    first, second = shared + prompt_of(5, seed=3), shared + prompt_of(7, seed=4)
    assert pair.post(**body(first, 8))["meta_info"]["cached_tokens"] == 0
    before = pair.decode.settled_info()["counters"]
    answer = pair.post(**body(second, 8))
    after = pair.decode.settled_info()["counters"]
    assert answer["meta_info"]["cached_tokens"] == 10 * PAGE
    assert answer["output_ids"] == GreedyTokens(pair.reference, second, 8)
    assert after["prefix_tokens_reused"] - before["prefix_tokens_reused"] == 10 * PAGE
    page_bytes = 3 * 2 * 2 * PAGE * 16 * 4  # layers, k and v, heads, tokens, dim, fp32
    assert after["transfer_bytes"] - before["transfer_bytes"] == page_bytes, (
        "more than the page of the seven new tokens was sent"
    )


def test_every_stream_event_has_the_cached_tokens(pair: Pair) -> None:
    prompt = prompt_of(3 * PAGE + 1, seed=8)
    pair.post(**body(prompt, 2))
    with HTTP.stream("POST", f"{pair.decode.url}/generate", json=body(prompt, 8, stream=True), timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert len(lines) > 1
    assert {json.loads(line)["meta_info"]["cached_tokens"] for line in lines} == {3 * PAGE}
    details = {"device": 3 * PAGE, "host": 0, "storage": 0}
    assert all(json.loads(line)["meta_info"]["cached_tokens_details"] == details for line in lines)


def test_next_turn_of_a_conversation_reuses_generated_tokens(pair: Pair) -> None:
    """Decode caches what it has generated; the next turn transfers only the rest of its prompt."""
    prompt = prompt_of(20, seed=5)
    answer = pair.post(**body(prompt, 40))["output_ids"]
    following = prompt + answer + prompt_of(3, seed=6)
    before = pair.decode.count("prefix_tokens_reused")
    assert pair.decode.generate(following, 8) == GreedyTokens(pair.reference, following, 8)
    assert pair.decode.count("prefix_tokens_reused") - before == (20 + 40 - 1) // PAGE * PAGE


def test_flush_cache_drops_prefixes(pair: Pair) -> None:
    prompt = prompt_of(5 * PAGE, seed=7)
    pair.post(**body(prompt, 2))
    for server in (pair.prefill, pair.decode):
        assert HTTP.post(f"{server.url}/flush_cache", timeout=5).status_code == 200
    assert pair.post(**body(prompt, 2))["meta_info"]["cached_tokens"] == 0
    assert pair.post(**body(prompt, 2))["meta_info"]["cached_tokens"] == 4 * PAGE, (
        "all pages but that of the last token, which is always computed"
    )


@pytest.mark.parametrize("length", [1, 17, 64, 65, 150])
def test_logprobs_equal_transformers(pair: Pair, length: int) -> None:
    """For the prompt (computed on prefill in chunks, cached or not) and for the output."""
    prompt = prompt_of(length, seed=length)
    pair.post(**body(prompt, 1))  # caches its prefix
    meta = pair.post(**body(prompt, 6), return_logprob=True, top_logprobs_num=3, logprob_start_len=0)["meta_info"]
    tokens = [*prompt, *GreedyTokens(pair.reference, prompt, 6)]
    expected = torch.log_softmax(reference_logits(pair.reference, tokens), dim=-1)
    got = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert [entry[1] for entry in got] == tokens
    assert got[0][0] is None
    for position in range(1, len(tokens)):
        assert got[position][0] == pytest.approx(float(expected[position - 1, tokens[position]]), abs=1e-4)
        best = torch.topk(expected[position - 1], 3)
        assert [entry[1] for entry in tops[position]] == best.indices.tolist()
        assert [entry[0] for entry in tops[position]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logit_bias_acts_on_prefill_and_on_decode(pair: Pair) -> None:
    """Tokens with a bias of -100 do not occur, from the first token (sampled on prefill) to the last."""
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "presence_penalty": 2.0}
    plain = pair.post(**body(prompt_of(9, seed=8), 40))["output_ids"]
    bias = {str(token): -100 for token in set(plain)}
    biased = pair.post(input_ids=prompt_of(9, seed=8), sampling_params={**sampling, "logit_bias": bias})["output_ids"]
    assert not set(biased) & set(plain)


def test_request_ended_by_a_stop_string_has_a_timeline(pair: Pair) -> None:
    text = pair.post(text="hello", sampling_params={"max_new_tokens": 30, "temperature": 0, "ignore_eos": True})["text"]
    stop = text[6:9]
    answer = pair.post(
        text="hello", sampling_params={"max_new_tokens": 30, "temperature": 0, "ignore_eos": True, "stop": stop}
    )
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["meta_info"]["timeline"]["decode"] > 0


@pytest.mark.parametrize("retract_memory_gib", ["1", "0"], ids=["copied to host", "recomputed"])
def test_pool_for_three_requests_serves_twelve_with_correct_tokens(
    source: Source, llama: Path, retract_memory_gib: str
) -> None:
    """Each request gets the tokens of transformers, and none fails."""
    prompts = [prompt_of(20 + index, seed=20 + index) for index in range(12)]
    flags = ("--kv-tokens", str(3 * 112), "--growth-tokens", "16", "--retract-memory-gib", retract_memory_gib)
    decode = source.decode(*flags)
    with ThreadPoolExecutor(12) as pool:
        outputs = list(pool.map(lambda prompt: decode.generate(prompt, 80), prompts))
    reference = load_reference(llama)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 80
        assert is_reference_greedy(reference, prompt, output)
    counters = decode.settled_info()["counters"]
    assert counters["retractions"] > 0
    copied = counters["retractions"] - counters["retractions_recomputed"]
    assert (copied > 0) == (retract_memory_gib == "1"), (
        "with host memory, KV is copied until decode has measured that computing takes less time"
    )
    source.end(decode)


def test_full_queue_responds_429(source: Source) -> None:
    decode = source.decode("--kv-tokens", "256", "--max-queued-requests", "2", "--max-running-requests", "1")
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda index: decode.post(prompt_of(100, seed=index), 100), range(8)))
    refused = [response for response in responses if response.status_code == 429]
    assert refused
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert {response.status_code for response in responses} == {200, 429}
    source.end(decode)


def test_small_requests_overtake_a_large_one_without_starving_it(source: Source) -> None:
    """A request that needs nearly the whole pool waits while 16 small ones pass, and is served before the others."""
    decode = source.decode("--kv-tokens", "1024", "--growth-tokens", "200", "--max-running-requests", "8")
    with ThreadPoolExecutor(40) as pool:
        running = [pool.submit(decode.post, prompt_of(20, seed=index), 200) for index in range(6)]
        wait_until(lambda: decode.info()["states"]["running"] >= 1, 10, "the pool is busy")
        large = pool.submit(decode.post, prompt_of(950, seed=99), 30)
        wait_until(lambda: decode.info()["counters"]["requests"] > len(running), 10, "the large request has arrived")
        small = [pool.submit(decode.post, prompt_of(20, seed=200 + index), 40) for index in range(30)]
        assert large.result().status_code == 200
        assert not all(future.done() for future in small), "the large request was served last"
        assert all(future.result().status_code == 200 for future in [*running, *small])
    assert decode.settled_info()["counters"]["overtakes"] > 0
    source.end(decode)


def test_request_past_its_deadline_responds_504(pair: Pair) -> None:
    request = {**body(prompt_of(10, seed=1), 3000), "timeout_s": 0.4}
    response = HTTP.post(f"{pair.decode.url}/generate", json=request, timeout=30)
    assert response.status_code == 504
    assert "deadline" in response.json()["error"]["message"]


def test_higher_priority_goes_first(source: Source) -> None:
    """The pool serves one request at a time: of those that wait, the one with the highest priority is next."""
    decode = source.decode("--kv-tokens", "416", "--growth-tokens", "1000")
    ended: list[str] = []

    def send(name: str, priority: int) -> None:
        decode.post(prompt_of(200, seed=len(name)), 20, priority=priority).raise_for_status()
        ended.append(name)

    first = body(prompt_of(20, seed=5), 380, stream=True)
    with (
        ThreadPoolExecutor(3) as pool,
        HTTP.stream("POST", f"{decode.url}/generate", json=first, timeout=60) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        for name in ("a", "b"):
            pool.submit(send, name, 0)
        wait_until(lambda: decode.info()["states"]["queued"] == 2, 10, "two wait")
        pool.submit(send, "urgent", 5)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert (ended[0], sorted(ended)) == ("urgent", ["a", "b", "urgent"])
    source.end(decode)


def test_prompt_longer_than_the_prefill_pool_responds_413(source: Source) -> None:
    """The page sizes also differ, and prefill logs how many writes that takes."""
    model = source.prefill.model
    small = source.servers.add("prefill", model, "--kv-tokens", "256", "--chunk-size", "64", "--page-size", "8")
    decode = source.servers.add("decode", model, "--prefill", small.endpoint, "--kv-tokens", "2048")
    decode.wait_ready(peers=1)
    response = decode.post(prompt_of(257, 1), 4)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert response.json()["error"]["message"] == ("the prompt (257 tokens) exceeds prefill's KV pool of 256 tokens")
    assert len(decode.generate(prompt_of(256, 1), 4)) == 4
    assert "page sizes differ: 8 on prefill, 16 on decode. A chunk of 64 tokens takes" in small.log.read_text()
    decode.check_clean()
    small.check_clean()
    assert (decode.stop(), small.stop()) == (0, 0)


def test_timeline_separates_waiting_from_computing(pair: Pair) -> None:
    """prefill_queue is the time behind other prompts, prefill the time of computing."""
    outputs = pair.post(
        input_ids=[prompt_of(640, 100 + number) for number in range(6)],
        sampling_params={"max_new_tokens": 1, "temperature": 0},
    )
    timelines = sorted((output["meta_info"]["timeline"] for output in outputs), key=lambda stages: sum(stages.values()))
    waits, computing = ([stages[name] for stages in timelines] for name in ("prefill_queue", "prefill"))
    assert waits[-1] > 2 * waits[0]
    assert waits[-1] > computing[-1], "the last prompt waited for five others"
    assert all(stages["queue"] < 0.2 for stages in timelines), "a prompt waited for memory of decode"
