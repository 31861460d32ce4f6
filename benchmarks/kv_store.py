"""Time to first token of prompts that are computed, and of the same prompts from a KV store.

    python -m benchmarks.kv_store
    python -m benchmarks.kv_store --input-len 4000 --prompts 4

Starts a store and a pair on this machine; settings of the servers are those of `pdserve up`, such as `--threads 2`.
Each prompt is sent twice. Between the two requests, the prompt is written to the store, and the prefix caches of both
servers are flushed. All requests generate one token. Exits with 1 if the median of the second requests is more than
MOST_RATIO of that of the first ones, or if less than LEAST_LOADED of the tokens are loaded.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.serve import pair_on_free_ports
from pdserve.common.errors import PdserveError, StartupError
from pdserve.configs.flags import add_flags, given_flags
from pdserve.server.launch.pair import PAIR_FIELDS
from pdserve.server.launch.store_options import take_local_store
from pdserve.server.launch.up import RunningPair, base_url, running_pair

MOST_RATIO = 0.3
LEAST_LOADED = 0.95
WRITTEN_S = 60.0
"""Longest wait until a prompt is in the store."""
POLL_S = 0.05


def main() -> int:
    options, flags = _parse()
    screen = Console(stderr=True, highlight=False)
    try:
        store = take_local_store(flags)
        with running_pair(pair_on_free_ports(flags), screen, store) as pair:
            pair.wait_ready()
            cold, stored, loaded = _measure(pair, options)
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 2 if isinstance(error, StartupError) else 1
    table = Table(title=f"time to first token, {options.prompts} prompts of {options.input_len} tokens")
    for column in ("", "median ms", "best ms", "worst ms"):
        table.add_column(column, justify="right")
    for name, seconds in (("computed", cold), ("from the store", stored)):
        times = (statistics.median(seconds), min(seconds), max(seconds))
        table.add_row(name, *(f"{1000 * value:.0f}" for value in times))
    out = Console(highlight=False, width=120)
    out.print(table)
    ratio = statistics.median(stored) / statistics.median(cold)
    out.print(
        f"from the store: {ratio:.2f} of the time (target: at most {MOST_RATIO}), {loaded:.1%} of the tokens loaded "
        f"(target: at least {LEAST_LOADED:.0%})"
    )
    return int(ratio > MOST_RATIO or loaded < LEAST_LOADED)


def _measure(pair: RunningPair, options: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Times of the first and of the second request of each prompt, and the share of tokens from the store."""
    draw = random.Random(1)
    cold: list[float] = []
    stored: list[float] = []
    loaded = 0.0
    prefill = base_url(pair.config.prefill)
    with pair.client(timeout_s=600.0) as client:
        _wait(lambda: client.get(f"{prefill}/health").json()["kv_store"]["state"] == "ok", "the store")
        for number in range(options.prompts + 1):
            prompt = draw.choices(range(1000, 20000), k=options.input_len)
            first_s, expected = _ask(client, prompt)
            _wait(lambda: _settled(client, prefill), "the prompt in the store")
            for url in (prefill, pair.url):
                client.post(f"{url}/flush_cache").raise_for_status()
            _wait(lambda: _gauge(client, prefill, "cached_pages") == 0, "an empty prefix cache")
            before = _counter(client, prefill, "store_tokens_loaded")
            second_s, token = _ask(client, prompt)
            if token != expected:
                raise PdserveError(f"the first token from the store is {token}, the computed one is {expected}")
            _wait(lambda: _settled(client, prefill), "the prompt in the store")
            if number:  # the first prompt warms up
                cold.append(first_s)
                stored.append(second_s)
                loaded += _counter(client, prefill, "store_tokens_loaded") - before
    return cold, stored, loaded / (options.prompts * options.input_len)


def _ask(client: httpx.Client, prompt: list[int]) -> tuple[float, int]:
    started = time.monotonic()
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    response = client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling}).raise_for_status()
    return time.monotonic() - started, response.json()["output_ids"][0]


def _settled(client: httpx.Client, url: str) -> bool:
    """The server has computed everything, and written it to the store. Its state is up to half a second old."""
    time.sleep(1.0)
    info = client.get(f"{url}/server_info").json()
    return not sum(info["states"].values()) and not info["gauges"]["kv_store_queued_blocks"]


def _gauge(client: httpx.Client, url: str, name: str) -> float:
    return float(client.get(f"{url}/server_info").json()["gauges"][name])


def _counter(client: httpx.Client, url: str, name: str) -> float:
    return float(client.get(f"{url}/server_info").json()["counters"][name])


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WRITTEN_S
    while not condition():
        if time.monotonic() > deadline:
            raise PdserveError(f"no {what} after {WRITTEN_S:.0f} s")
        time.sleep(POLL_S)


def _parse() -> tuple[argparse.Namespace, dict[str, str | bool]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-len", type=int, default=1500, help="tokens of a prompt (default: 1500)")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts (default: 8)")
    servers = parser.add_argument_group("settings of the two servers, as of 'pdserve up'")
    add_flags(servers, PAIR_FIELDS, PAIR_FIELDS)
    options = parser.parse_args()
    flags = {"kv_store": "1GiB", "local_prefill": "never", **given_flags(options, PAIR_FIELDS)}
    return options, flags


if __name__ == "__main__":
    sys.exit(main())
