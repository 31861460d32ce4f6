"""Features of servers with data-parallel ranks of mixtures with KV heads, each on prefill, on decode, and on a server
that computes its prompts itself.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from pdserve.server.launch.store_node import find_master
from tests.checkpoints import VOCAB_SIZE, GreedyTokens, TinyArchitecture, load_reference
from tests.cluster.real_store import Store
from tests.cluster.servers import HTTP, Cluster, Server
from tests.cluster.test_changing_roles import become
from tests.cluster.test_mixture_dp_pair import DP2, LENGTHS, NEW_TOKENS, TP2, make_model
from tests.cluster.test_store_servers import PATIENT, forget, meta, wait_for_blocks, wait_for_store
from tests.fp8_reference import rounded_greedy
from tests.ports import free_ports
from tests.scheduler.engine.kv_event_subscribers import Follower

Layout = Literal["TP to DEP", "DEP to TP", "DEP alone"]
KvDtype = Literal["auto", "fp8_e4m3"]
LAYOUTS: dict[Layout, tuple[tuple[str, ...] | None, tuple[str, ...]]] = {
    "TP to DEP": (TP2, DP2),
    "DEP to TP": (DP2, TP2),
    "DEP alone": (None, (*DP2, "--local-prefill", "always")),
}
"""Layouts of prefill and decode."""
LONG_OUTPUT, CLIENTS = 80, 14
"""Of requests with one prompt, whose pages they share: seven on each of two ranks do not fit, four would."""
BLOCK, TURN = 32, 220
"""Tokens of a block of the KV store; of a prompt, whose answer completes another block."""


class Case(NamedTuple):
    layout: Layout
    family: TinyArchitecture
    kv_dtype: KvDtype


CASES = [
    Case("TP to DEP", "qwen3_moe", "fp8_e4m3"),
    Case("DEP to TP", "mixtral", "fp8_e4m3"),
    Case("DEP to TP", "gpt_oss", "auto"),
    Case("DEP alone", "gpt_oss", "fp8_e4m3"),
]


def start(
    servers: Cluster,
    model: Path,
    layout: Layout,
    decode_flags: Sequence[str],
    *common: str,
    of_prefill: Sequence[str] = (),
) -> list[Server]:
    """The prefill server, if the layout has one, and the decode server."""
    prefill_layout, decode_layout = LAYOUTS[layout]
    prefills, flags = [], (*decode_layout, "--page-size", "8", *decode_flags, *common)
    if prefill_layout is not None:
        sizes = ("--page-size", "16", "--chunk-size", "48", "--kv-tokens", "4096")
        prefills = [servers.add("prefill", model, *prefill_layout, *sizes, *common, *of_prefill)]
        flags = (*flags, "--prefill", prefills[0].endpoint)
    decode = servers.add("decode", model, *flags)
    for server in prefills:
        server.wait_ready()
    return [*prefills, decode.wait_ready(peers=len(prefills))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case).replace(" ", "_"))
def test_every_kind_of_request_gets_the_tokens_of_transformers(servers: Cluster, tmp_path: Path, case: Case) -> None:
    """Samples, log probabilities, grammars, cached prefixes, and more requests than fit. With fp8, of a model with a
    rounded cache.
    """
    model = make_model(tmp_path / "model", case.family)
    reference = load_reference(model.directory)
    fp8 = case.kv_dtype == "fp8_e4m3"
    greedy = functools.partial(rounded_greedy if fp8 else GreedyTokens, reference)
    expected: list[Any] = [greedy(prompt, NEW_TOKENS) for prompt in model.prompts]
    small = ("--kv-tokens", "480", "--growth-tokens", "8")
    *_, decode = started = start(servers, model.directory, case.layout, small, "--kv-dtype", case.kv_dtype)
    with ThreadPoolExecutor(CLIENTS + len(LENGTHS)) as pool:
        many = [pool.submit(decode.generate, model.prompts[-2], LONG_OUTPUT) for _ in range(CLIENTS)]
        few = [pool.submit(decode.generate, prompt, NEW_TOKENS) for prompt in model.prompts]
        assert [each.result() for each in few] == expected
        assert [each.result() for each in many] == [greedy(model.prompts[-2], LONG_OUTPUT)] * CLIENTS
    counters = decode.settled_info()["counters"]
    assert counters["retractions"] > 0
    assert counters["prefix_tokens_reused"] > 0
    sampling: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "n": 3}
    request = {"input_ids": model.prompts[3], "sampling_params": sampling}
    answers = HTTP.post(f"{decode.url}/generate", json=request, timeout=60).raise_for_status().json()
    assert [each["output_ids"] for each in answers] == [expected[3]] * 3
    scored = decode.post(model.prompts[4], NEW_TOKENS, return_logprob=True, logprob_start_len=0)
    answer = scored.raise_for_status().json()
    assert answer["output_ids"] == expected[4]
    assert len(answer["meta_info"]["input_token_logprobs"]) == LENGTHS[4]
    constrained = {"max_new_tokens": 12, "temperature": 0, "regex": "(ab){6}"}
    bodies = [{"input_ids": prompt, "sampling_params": constrained} for prompt in model.prompts[1:5]]
    with ThreadPoolExecutor() as pool:
        texts = pool.map(lambda each: HTTP.post(f"{decode.url}/generate", json=each, timeout=60).json()["text"], bodies)
        assert list(texts) == ["ab" * 6] * 4
    for server in started:
        server.check_clean()
    assert decode.stop() == 0


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = Store()
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.skipif(find_master() is None, reason="the Mooncake wheel has no mooncake_master")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversation_continues_from_the_store(servers: Cluster, store: Store, tmp_path: Path, layout: Layout) -> None:
    """Both servers write to the store, and the one that computes prompts loads what both have written, whichever rank
    gets the prompt.
    """
    model = make_model(tmp_path / "model", "qwen3_moe")
    reference, draw = load_reference(model.directory), random.Random(layout)
    with_store = ("--kv-store", store.url, *PATIENT)
    *_, decode = started = start(servers, model.directory, layout, ("--kv-tokens", "4096"), *with_store)
    computing = started[0]
    wait_for_store(*started)
    prompts = [draw.choices(range(VOCAB_SIZE), k=TURN) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda prompt: decode.generate(prompt, NEW_TOKENS), prompts))
    assert answers == [GreedyTokens(reference, prompt, NEW_TOKENS) for prompt in prompts]
    for server in started:
        wait_for_blocks(server, len(prompts) if server is not computing else len(prompts) * (TURN // BLOCK))
        forget(server)
    turns = [[*prompt, *answer, *prompt[:30]] for prompt, answer in zip(prompts, answers, strict=True)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda turn: meta(decode.post(turn, NEW_TOKENS)), turns))
    stored = (TURN + NEW_TOKENS - 1) // BLOCK * BLOCK
    assert [output for output, _ in found] == [GreedyTokens(reference, turn, NEW_TOKENS) for turn in turns]
    assert [cached for _, cached in found] == [stored] * 4
    assert computing.count("store_tokens_loaded") == 4 * stored
    for server in started:
        server.check_clean()


@pytest.mark.parametrize(("layout", "role"), [("TP to DEP", "decode"), ("DEP to TP", "prefill")])
def test_kv_events_of_all_ranks(servers: Cluster, tmp_path: Path, layout: Layout, role: str) -> None:
    model = make_model(tmp_path / "model", "mixtral")
    port = free_ports(2)
    events = ("--kv-events-port", str(port))
    on_decode, on_prefill = (events, ()) if role == "decode" else ((), events)
    started = start(servers, model.directory, layout, ("--kv-tokens", "2048", *on_decode), of_prefill=on_prefill)
    page_size = 8 if role == "decode" else 16
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: started[1].generate(prompt, NEW_TOKENS), model.prompts))
    assert found == model.expected
    with Follower(port, port + 1, page_size=page_size) as follower:

        def known(prompt: list[int]) -> bool:
            return follower.cached_tokens(tuple(prompt)) == len(prompt) // page_size * page_size

        for prompt in model.prompts:
            follower.follow(functools.partial(known, prompt))
        assert follower.ranks == {0, 1}


def test_data_parallel_server_changes_its_role_and_back(servers: Cluster, tmp_path: Path) -> None:
    """Its staging rings and its ranks with all heads belong to each role in turn."""
    model = make_model(tmp_path / "model", "qwen3_moe")
    pool = ("--kv-tokens", "4096", "--page-size", "16")
    switching = servers.add("prefill", model.directory, *DP2, *pool, "--allow-role-switch", leaders=3)
    staying = servers.add("prefill", model.directory, *TP2, *pool)
    endpoints = f"{switching.endpoint},{staying.endpoint}"
    decode = servers.add("decode", model.directory, *TP2, *pool, "--prefill", endpoints)
    switching.wait_ready(peers=1)
    decode.wait_ready(peers=2)

    def generate(server: Server, source: Server) -> None:
        with ThreadPoolExecutor() as clients:
            found = clients.map(
                lambda prompt: server.generate(prompt, NEW_TOKENS, **source.bootstrap),
                model.prompts,
            )
            assert list(found) == model.expected

    generate(decode, switching)
    become(switching, "decode", settings={"prefill": [staying.endpoint], "local_prefill": "never"})
    decode.wait_ready(peers=1)
    switching.wait_ready(peers=1)
    generate(switching, staying)
    assert staying.count("staged_parts") > 0
    assert all(rank["gauges"]["cached_pages"] > 0 for rank in switching.info()["dp_ranks"]), "a rank got no request"
    become(switching, "prefill")
    decode.wait_ready(peers=2)
    HTTP.post(f"{decode.url}/flush_cache", timeout=5).raise_for_status()
    before = switching.count("staged_parts")
    generate(decode, switching)
    assert switching.count("staged_parts") > before
    for server in (decode, staying, switching):
        server.check_clean()
