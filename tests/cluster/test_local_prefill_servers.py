"""Local prefill: decode servers compute prompts themselves, always or when prefill servers are lost or slower. Tokens
do not depend on where a prompt is computed.
"""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import VOCAB_SIZE, GreedyTokens, LatentArchitecture, load_reference, make_dsa_checkpoint
from tests.cluster.servers import HTTP, Cluster, Server, body, cluster, wait_until
from tests.cluster.test_random_mix import REQUESTS, send_all

FULL = os.environ.get("PDSERVE_MATRIX") == "full"
"""`make test-matrix`: every model with latent attention."""
NEW_TOKENS = 10
PAGE, STEP = 8, 32
LENGTHS = (1, PAGE, PAGE + 1, STEP, STEP + 1, 3 * STEP + 5, 150)
DECODE = ("--page-size", str(PAGE), "--kv-tokens", "16384", "--quarantine-s", "1")
SERVE = (*DECODE, "--max-step-tokens", str(STEP))
SLOW_AUTO = (*DECODE, "--local-prefill", "auto", "--max-step-tokens", str(PAGE))
"""Small steps, so that the prefill server computes long prompts faster than this server."""
PREFILL = ("--page-size", "16", "--chunk-size", "16", "--kv-tokens", "16384")


class Model(NamedTuple):
    prompts: list[list[int]]
    expected: list[GreedyTokens]


class Servers(NamedTuple):
    """A prefill server and three decode servers; `always` is a `pdserve serve`, without a prefill server."""

    prefill: Server
    never: Server
    auto: Server
    always: Server


@pytest.fixture(scope="module")
def model(llama: Path) -> Model:
    draw, reference = random.Random(11), load_reference(llama)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in LENGTHS]
    return Model(prompts, [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module")
def started(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with cluster(tmp_path_factory.mktemp("local-prefill")) as servers:
        prefill = servers.add("prefill", llama, *PREFILL)
        never = servers.add("decode", llama, "--prefill", prefill.endpoint, *DECODE)
        auto = servers.add("decode", llama, "--prefill", prefill.endpoint, *SLOW_AUTO)
        always = servers.add("serve", llama, *SERVE)
        prefill.wait_ready(peers=2)
        never.wait_ready(peers=1)
        auto.wait_ready(peers=1)
        always.wait_ready()
        yield Servers(prefill, never, auto, always)
        for server in servers.servers:
            server.check_clean()


def local_prompts(server: Server) -> int:
    """Prompts that a decode server has placed on itself."""
    counters = server.settled_info()["counters"]
    return int(sum(count for name, count in counters.items() if name.startswith("local_prefill_")))


@pytest.mark.parametrize("mode", ["never", "auto", "always"])
def test_tokens_equal_transformers(started: Servers, model: Model, mode: str) -> None:
    server: Server = getattr(started, mode)
    assert [server.generate(prompt, NEW_TOKENS) for prompt in model.prompts] == model.expected
    HTTP.post(f"{server.url}/flush_cache", timeout=5).raise_for_status()
    response = HTTP.post(f"{server.url}/generate", json=body(model.prompts, NEW_TOKENS), timeout=60)
    assert [result["output_ids"] for result in response.raise_for_status().json()] == model.expected
    counters = server.settled_info()["counters"]
    assert (counters["transfers"] > 0) == (mode != "always")
    if mode != "auto":
        assert local_prompts(server) == (2 * len(LENGTHS) if mode == "always" else 0)


def test_server_info_tells_whether_the_prefill_server_shares_the_cpu(started: Servers) -> None:
    """Each server of these tests has one thread."""
    (peer,) = started.auto.info()["peers"]
    assert peer["shares_device"] is (len(os.sched_getaffinity(0)) < 2)


def test_chunks_run_beside_decode_steps_without_changing_their_tokens(started: Servers, model: Model) -> None:
    """Prompts of many chunks arrive while other requests run."""
    server = started.always
    HTTP.post(f"{server.url}/flush_cache", timeout=5).raise_for_status()
    long = model.prompts[-1]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.generate, prompt, 60) for prompt in model.prompts[:3]]
        joined = list(pool.map(lambda at: server.generate([*long[at:], *long[:at]], NEW_TOKENS), range(5)))
        outputs = [future.result() for future in running]
    assert [output[:NEW_TOKENS] for output in outputs] == model.expected[:3]
    assert joined == [server.generate([*long[at:], *long[:at]], NEW_TOKENS) for at in range(5)]
    assert joined[0] == model.expected[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": {"temperature": 1.0, "sampling_seed": 7, "n": 3}},
        {"sampling_params": {"temperature": 0.8, "sampling_seed": 3, "repetition_penalty": 1.3}},
        {"sampling_params": {"temperature": 0}, "return_logprob": True, "logprob_start_len": 5, "top_logprobs_num": 2},
        {"sampling_params": {"temperature": 0}, "return_logprob": True, "logprob_start_len": 0},
    ],
    ids=["samples", "penalty", "logprobs", "logprobs-from-0"],
)
def test_sampling_is_the_same_wherever_the_prompt_is_computed(
    started: Servers, model: Model, options: dict[str, Any]
) -> None:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **options["sampling_params"]}
    replies = []
    for server in (started.never, started.always, started.always):  # the last one finds cached pages
        payload = {"input_ids": model.prompts[-1], **options, "sampling_params": sampling}
        reply = HTTP.post(f"{server.url}/generate", json=payload, timeout=60).raise_for_status().json()
        replies.append(reply if isinstance(reply, list) else [reply])
    remote, *local = replies
    for reply in local:
        assert [result["output_ids"] for result in reply] == [result["output_ids"] for result in remote]
        for ours, theirs in zip(reply, remote, strict=True):
            for field in ("input_token_logprobs", "output_token_logprobs"):
                expected = theirs["meta_info"].get(field, [])
                found = ours["meta_info"].get(field, [])
                assert [entry[1] for entry in found] == [entry[1] for entry in expected]
                for (logprob, *_), (wanted, *_) in zip(found, expected, strict=True):
                    assert logprob == (wanted if wanted is None else pytest.approx(wanted, abs=1e-4))


def test_cached_prefix_is_not_computed_again(started: Servers, model: Model) -> None:
    server, prompt = started.always, [*model.prompts[-1], 3, 1, 4]
    expected = started.never.generate(prompt, NEW_TOKENS)
    assert server.generate(prompt, NEW_TOKENS) == expected
    reply = server.post(prompt, NEW_TOKENS).json()
    assert reply["output_ids"] == expected
    assert reply["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE


def test_no_request_fails_when_all_prefill_servers_are_killed_and_long_prompts_return_to_a_new_one(
    started: Servers, llama: Path
) -> None:
    prefill, decode = started.prefill, started.auto
    reference, draw = load_reference(llama), random.Random(5)
    prompts = [draw.choices(range(VOCAB_SIZE), k=draw.choice([20, 300, 700])) for _ in range(10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = [pool.submit(decode.post, prompt, NEW_TOKENS) for prompt in prompts]
        wait_until(lambda: decode.info()["states"]["prefilling"] > 0, 20, "a prompt is at prefill")
        prefill.kill()
        responses = [reply.result() for reply in replies]
    assert [response.status_code for response in responses] == [200] * len(prompts), [r.text for r in responses]
    counters = decode.settled_info()["counters"]
    assert counters["local_prefill_absent"] > 0
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.json()["output_ids"] == GreedyTokens(reference, prompt, NEW_TOKENS)
    prefill.start().wait_ready()
    decode.wait_ready(peers=1)
    before = decode.count("transfers")
    for _ in range(3):
        decode.generate(draw.choices(range(VOCAB_SIZE), k=1500), 2)
    assert decode.count("transfers") >= before + 2, "more than one long prompt was computed by decode"


@pytest.mark.parametrize("ranks", [("--tp", "2"), ("--pp", "2")], ids=["tp2", "pp2"])
def test_tokens_equal_transformers_with_several_ranks(
    servers: Cluster, llama: Path, model: Model, ranks: tuple[str, str]
) -> None:
    server = servers.add("serve", llama, *SERVE, *ranks).wait_ready()
    with ThreadPoolExecutor(len(model.prompts)) as pool:
        assert list(pool.map(lambda prompt: server.generate(prompt, NEW_TOKENS), model.prompts)) == model.expected
    reply = server.post(model.prompts[-1], NEW_TOKENS, return_logprob=True, logprob_start_len=0).json()
    assert reply["output_ids"] == model.expected[-1]
    assert len(reply["meta_info"]["input_token_logprobs"]) == len(model.prompts[-1])
    assert local_prompts(server) == len(model.prompts) + 1
    server.check_clean()


@pytest.mark.parametrize("architecture", ["deepseek_v32", "deepseek_v3"] if FULL else ["deepseek_v32"])
def test_tokens_of_a_latent_attention_model_equal_transformers(
    servers: Cluster, tmp_path: Path, architecture: LatentArchitecture
) -> None:
    directory = make_dsa_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2)
    server = servers.add("serve", directory, "--kv-tokens", "4096", "--max-step-tokens", "48").wait_ready()
    reference, draw = load_reference(directory), random.Random(7)
    prompts = [draw.choices(range(VOCAB_SIZE), k=length) for length in (1, 16, 17, 49, 150)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: server.generate(prompt, NEW_TOKENS), prompts))
    assert outputs == [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
    server.check_clean()


@pytest.fixture(scope="module")
def small(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pool that is too small for all requests, so that they queue and are retracted."""
    flags = ("--kv-tokens", "320", "--growth-tokens", "4", "--max-running-requests", "8", "--max-step-tokens", "16")
    with cluster(tmp_path_factory.mktemp("small")) as servers:
        yield servers.add("serve", llama, *flags, "--retract-memory-gib", "0.00002").wait_ready()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUESTS, min_size=10, max_size=16))
def test_random_requests_leave_the_server_clean(small: Server, requests: list[dict[str, Any]]) -> None:
    send_all(small, requests)
    small.check_clean()


def test_server_gives_correct_tokens_after_random_requests(small: Server, llama: Path) -> None:
    reference, draw = load_reference(llama), random.Random(1)
    prompt = [draw.randrange(256) for _ in range(70)]  # a family of the random requests
    assert small.generate(prompt, 20) == GreedyTokens(reference, prompt, 20)
    counters = small.settled_info()["counters"]
    for event in ("retractions", "retractions_recomputed", "requests_aborted", "prefix_tokens_reused"):
        assert counters[event] > 0, event
