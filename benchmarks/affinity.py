"""How much of the history of conversations is computed again: with two prefill servers chosen by prefix or by load, and
with one server that has all the memory.

    python -m benchmarks.affinity
    python -m benchmarks.affinity --conversations 12 --turns 5 --model smollm2

Each case starts its own servers on this machine. Conversations begin one after the other and then run at the same time:
a turn adds a message and the last answer to the history. Prefill servers share `--kv-tokens` of memory. Exits with 1 if
two servers, by prefix, reuse less than TARGET of what one reuses.
"""

import argparse
import asyncio
import random
import sys
import time
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port, running, wait_ready
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.configs.setting_types import DispatchSetting

START_TIMEOUT_S = 600
TARGET = 0.95
VOCABULARY = 1000
"""Messages are random ids below this: ordinary words in any tokenizer."""


class Case(NamedTuple):
    name: str
    servers: int
    dispatch: DispatchSetting


class Result(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    first_token_s: float
    """Mean time to the first token."""
    counters: dict[str, float]


CASES = (
    Case("one prefill server", 1, "prefix"),
    Case("two, by prefix", 2, "prefix"),
    Case("two, by load", 2, "load"),
)


def main() -> int:
    options, screen = _parse(), Console(stderr=True, highlight=False)
    results: dict[str, Result] = {}
    try:
        for case in CASES:
            screen.print(f"{case.name} ...")
            results[case.name] = found = _measure(case, options, screen)
            screen.print(
                f"{case.name}: {found.cached_tokens} of {found.prompt_tokens} tokens reused, {found.seconds:.0f} s"
            )
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    Console(highlight=False, width=120).print(_table(results))
    one, two = (results[case.name].cached_tokens for case in CASES[:2])
    return 0 if two >= TARGET * one else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model (default: smollm2, the embedded one)")
    parser.add_argument("--conversations", type=int, default=50, help="conversations in all (default: 50)")
    parser.add_argument("--turns", type=int, default=10, help="turns of each conversation (default: 10)")
    parser.add_argument("--message-tokens", type=int, default=64, help="tokens of a message (default: 64)")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of an answer (default: 16)")
    parser.add_argument("--concurrency", type=int, default=4, help="conversations at a time (default: 4)")
    parser.add_argument(
        "--kv-tokens", type=int, default=65536, help="KV of all prefill servers together (default: 65536)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each server (default: 1)")
    return parser.parse_args()


def _measure(case: Case, options: argparse.Namespace, screen: Console) -> Result:
    common = {"model": options.model, "threads": options.threads, "log_level": "warning"}
    prefills = [
        PrefillConfig(
            **common, port=free_port(), bootstrap_port=free_port(), kv_tokens=options.kv_tokens // case.servers
        )
        for _ in range(case.servers)
    ]
    decode = DecodeConfig(
        **common,
        port=free_port(),
        prefill=tuple(f"127.0.0.1:{prefill.bootstrap_port}" for prefill in prefills),
        kv_tokens=2 * options.kv_tokens,
        dispatch=case.dispatch,
        local_prefill="never",
    )
    configs: dict[str, AnyServerConfig] = {f"prefill {i}": prefill for i, prefill in enumerate(prefills)}
    configs["decode"] = decode
    with running(configs, screen) as children:
        wait_ready(children, list(configs.values()), START_TIMEOUT_S)
        return asyncio.run(_converse(f"http://127.0.0.1:{decode.port}", case.servers, options))


async def _converse(url: str, servers: int, options: argparse.Namespace) -> Result:
    """Run all conversations, a few at a time: after its turn, a conversation goes to the end of the queue."""
    line: asyncio.Queue[tuple[int, int, list[int]]] = asyncio.Queue()
    for number in range(options.conversations):
        line.put_nowait((number, 0, []))
    latencies: list[float] = []
    prompt_tokens = cached_tokens = 0

    async def take_turns(client: httpx.AsyncClient) -> None:
        nonlocal prompt_tokens, cached_tokens
        while not line.empty():
            number, turn, history = line.get_nowait()
            history = history + random.Random(f"{number}.{turn}").choices(range(VOCABULARY), k=options.message_tokens)
            sampling = {"max_new_tokens": options.answer_tokens, "temperature": 0, "ignore_eos": True}
            reply = await client.post("/generate", json={"input_ids": history, "sampling_params": sampling})
            body = reply.raise_for_status().json()
            meta = body["meta_info"]
            prompt_tokens += meta["prompt_tokens"]
            cached_tokens += meta["cached_tokens"]
            latencies.append(sum(meta["timeline"].values()) - meta["timeline"]["decode"])
            if turn + 1 < options.turns:
                line.put_nowait((number, turn + 1, history + body["output_ids"]))

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        while sum(peer["state"] == "paired" for peer in (await _info(client))["peers"]) < servers:
            await asyncio.sleep(0.1)
        began = time.monotonic()
        await asyncio.gather(*(take_turns(client) for _ in range(options.concurrency)))
        seconds = time.monotonic() - began
        await asyncio.sleep(1.0)  # counters are sent a few times a second
        counters = (await _info(client))["counters"]
    return Result(prompt_tokens, cached_tokens, seconds, sum(latencies) / len(latencies), counters)


async def _info(client: httpx.AsyncClient) -> dict[str, Any]:  # JSON
    found: dict[str, Any] = (await client.get("/server_info")).raise_for_status().json()
    return found


def _table(results: dict[str, Result]) -> Table:
    most = results[CASES[0].name].cached_tokens
    table = Table("", "prompt tokens", "reused", "of one server", "expected", "mean TTFT", "seconds")
    for name, result in results.items():
        expected = result.counters["dispatch_tokens_expected"]
        table.add_row(
            name,
            f"{result.prompt_tokens:,}",
            f"{result.cached_tokens:,}",
            f"{result.cached_tokens / most:.1%}",
            f"{expected:,.0f}" if expected else "-",
            f"{result.first_token_s * 1000:.0f} ms",
            f"{result.seconds:.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
