"""The KV store dies under load and comes back empty on the same port: no answer is wrong, and it is used again."""

import itertools
import operator
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pdserve.server.launch.store_node import find_master
from tests.checkpoints import GreedyTokens, load_reference
from tests.cluster.real_store import Store
from tests.cluster.servers import Cluster, Server, wait_until
from tests.cluster.test_store_servers import BACK_S, PATIENT, meta, random_prompt, uses_store, wait_for_store

pytestmark = pytest.mark.skipif(find_master() is None, reason="the Mooncake wheel has no mooncake_master")

RESTARTS = 20 if os.environ.get("PDSERVE_STORE") == "full" else 2
DOWN_S = (0.0, 1.0, 6.0, 12.0)
"""How long the store is away: shorter and longer than Mooncake's calls wait for it."""
NEW_TOKENS = 8
PROMPTS, PROMPT_TOKENS = 12, 300
POOL = ("--kv-tokens", "1024")
"""Fewer tokens than the prompts have: pages are evicted, and loaded from the store again."""


def counts(servers: Sequence[Server]) -> tuple[int, int]:
    """Blocks written to the store and tokens loaded from it, by all servers together: a block is written by one."""
    found = [server.info()["counters"] for server in servers]
    return sum(each["store_blocks_written"] for each in found), sum(each["store_tokens_loaded"] for each in found)


def used_by_all(servers: Sequence[Server], before: tuple[int, int]) -> bool:
    """Whether all servers use the store, and blocks were written and tokens loaded since `before`."""
    return all(map(uses_store, servers)) and all(map(operator.gt, counts(servers), before))


@contextmanager
def load(
    prompts: list[tuple[list[int], GreedyTokens]], prefills: list[Server], decodes: list[Server]
) -> Iterator[None]:
    """Four clients ask in random order; at the end, every answer was right."""
    ended, answers = threading.Event(), itertools.count()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        while not ended.is_set():
            prompt, expected = draw.choice(prompts)
            response = draw.choice(decodes).post(prompt, NEW_TOKENS, 120, **draw.choice(prefills).bootstrap)
            assert meta(response)[0] == expected
            next(answers)

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(ask, seed) for seed in range(4)]
        try:
            yield
        finally:
            ended.set()
        for client in clients:
            client.result()
    assert next(answers) > 0


def test_killed_store_is_used_again_after_each_restart(servers: Cluster, llama: Path) -> None:
    reference = load_reference(llama)
    drawn = [random_prompt(f"restart {number}", PROMPT_TOKENS) for number in range(PROMPTS)]
    prompts = [(prompt, GreedyTokens(reference, prompt, NEW_TOKENS)) for prompt in drawn]
    store = Store()
    try:
        store.start()
        flags = ("--kv-store", store.url, *PATIENT, *POOL)
        prefills = [servers.add("prefill", llama, *flags) for _ in range(2)]
        both = ",".join(server.endpoint for server in prefills)
        decodes = [servers.add("decode", llama, "--prefill", both, *flags) for _ in range(2)]
        both_roles = [*prefills, *decodes]
        for server in both_roles:
            server.wait_ready(peers=2)
        wait_for_store(*both_roles)
        times = []
        with load(prompts, prefills, decodes):
            for restart in range(RESTARTS):
                store.kill()
                time.sleep(DOWN_S[restart % len(DOWN_S)])
                store.start()
                began = time.monotonic()
                before = counts(both_roles)
                wait_until(partial(used_by_all, both_roles, before), BACK_S, "use of the store")
                times.append(time.monotonic() - began)
                print(f"restart {restart}: used again after {times[-1]:.1f} s")
        for server in both_roles:
            assert server.count("store_outages") > 0
            server.check_clean()
    finally:
        store.close()
