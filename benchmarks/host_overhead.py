"""CPU time of the host per token and per decode step: of the frontend, the leader's threads and rank 0.

    python -m benchmarks.host_overhead
    python -m benchmarks.host_overhead --streams 128 --calls completion,completion-whole --context 8192 --json FILE
    python -m benchmarks.host_overhead --rounds 7 --streams 32 --against ../older   # an older checkout, in turn
    python -m benchmarks.host_overhead --rounds 7 --streams 1 --calls chat --against ../older

A real pair on this machine serves a model of one tiny layer, so that mostly the work around the model remains. Every
step waits for `--step-ms` without using the CPU, as for a GPU. The wait must be so long that no process falls behind: a
process that does handles several tokens at once and looks cheaper than it is (`events` per token are then less than 1).
The kernel counts CPU time per thread. All requests run in all measured steps: the cost of their beginning and end is
excluded. Of `chat` they are what is measured: `--chats` chats with tools and a schema, one at a time, of one token.

    front    the frontend process, per token
    engine   the leader's engine thread, per step
    link     the leader's thread that sends to the frontend, per step
    others   the leader's other threads, per step: the control thread, ZMQ's and torch's own
    rank 0   the thread of rank 0, per step: it prepares tensors, and here it also computes the tiny model
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.paced_server import Cost, read_cost
from benchmarks.results import ROOT, Figure, commit_of, figure_of_this_run, record
from benchmarks.servers import free_port, wait_ready, write_model
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.server.launch.children import Children
from pdserve.server.launch.up import base_url, server_command, server_environ

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 17,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 1023,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
PAGE_SIZE = 16
MAX_NEW_TOKENS = 4096
SETTLE_S = 0.3
SETTLING_CHATS = 20

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"stream": True}),
    "completion-logprobs": ("/v1/completions", {"stream": True, "logprobs": 5}),
    "completion-whole": ("/v1/completions", {}),
    "generate": ("/generate", {"stream": True}),
    "generate-logprobs": ("/generate", {"stream": True, "return_logprob": True, "top_logprobs_num": 5}),
}
"""Kinds of calls: route and body. Events of /generate are cumulative, OpenAI's are not."""
CHAT = "chat"

CHAT_TEMPLATE = """{%- for tool in tools or () %}{{ loop.index }}: {{ tool.function.name }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant:"""
MOST_ABOVE_US = 300.0
"""CPU time of the frontend that a chat may cost more than in the other checkout."""
MOST_RATIO = 1.05


@dataclass(frozen=True)
class Window:
    """Cost of the measured steps, in microseconds of CPU time."""

    call: str
    streams: int
    context: int
    commit: str
    steps: int  # of `chat`: chats
    events: float  # per token
    front_us: float  # per token; all others per step, of `chat` per chat
    engine_us: float
    link_us: float
    others_us: float
    rank_us: float


class Stream(asyncio.Protocol):
    """One request; counts the events of its response and discards them."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.refused: str | None = None
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]  # uvloop's is a Transport in all but name

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.refused = data.decode(errors="replace")


class Bench:
    """Loads the decode server with one kind of call at a time."""

    def __init__(self, commit: str, decode: DecodeConfig, folder: Path, options: argparse.Namespace) -> None:
        self._commit = commit
        self._url = base_url(decode)
        self._port = decode.port
        self._folder = folder
        self._options = options

    async def window(self, call: str, streams: int, context: int) -> Window:
        """Start the requests, wait until all run, count `--steps` steps, end them."""
        loop, cost = asyncio.get_running_loop(), read_cost(self._folder)
        begun_at = cost.steps
        open_streams = [
            (await loop.create_connection(lambda: Stream(self._request(call, context)), "127.0.0.1", self._port))[1]
            for _ in range(streams)
        ]
        while cost.steps == begun_at or cost.last_rows < streams:
            if refused := next((stream.refused for stream in open_streams if stream.refused), None):
                raise PdserveError(f"a request failed: {refused}")
            await asyncio.sleep(0.05)
            cost = read_cost(self._folder)
        await asyncio.sleep(SETTLE_S)
        events, front_s, before = (
            sum(stream.events for stream in open_streams),
            self._front_s(),
            read_cost(self._folder),
        )
        after = before
        while after.steps < before.steps + self._options.steps:
            # seldom: a query costs the engine thread as much as a step
            await asyncio.sleep(self._options.steps * self._options.step_ms / 1000)
            after = read_cost(self._folder)
        events = sum(stream.events for stream in open_streams) - events
        front_s, steps, tokens = self._front_s() - front_s, after.steps - before.steps, after.rows - before.rows
        if tokens != steps * streams:
            raise PdserveError(f"{steps} steps of {streams} streams had {tokens} rows: a stream has ended too early")
        for stream in open_streams:
            assert stream.transport is not None
            stream.transport.close()
        await self._wait_idle()
        load = (call, streams, context)
        return self._made(load, before, after, steps, tokens, events, front_s)

    async def chats(self) -> Window:
        """Send `--chats` chats, one after another. Their grammar is known to the server."""
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
            body = json.dumps(chat_body())
            for _ in range(SETTLING_CHATS):
                (await http.post(f"{self._url}/v1/chat/completions", content=body)).raise_for_status()
            front_s, before = self._front_s(), read_cost(self._folder)
            for _ in range(self._options.chats):
                (await http.post(f"{self._url}/v1/chat/completions", content=body)).raise_for_status()
        count, front_s = self._options.chats, self._front_s() - front_s
        load = (CHAT, 1, 0)
        return self._made(load, before, read_cost(self._folder), count, count, count, front_s)

    def _made(
        self,
        load: tuple[str, int, int],
        before: Cost,
        after: Cost,
        steps: int,
        tokens: int,
        events: int,
        front_s: float,
    ) -> Window:
        spent = {name: after.threads_s[name] - before.threads_s.get(name, 0.0) for name in after.threads_s}
        named = {name: spent.get(name, 0.0) for name in ("MainThread", "frontend-link", "rank-0")}
        others_s = after.process_s - before.process_s - sum(named.values())
        return Window(
            *load,
            commit=self._commit,
            steps=steps,
            events=events / tokens,
            front_us=1e6 * front_s / tokens,
            engine_us=1e6 * named["MainThread"] / steps,
            link_us=1e6 * named["frontend-link"] / steps,
            others_us=1e6 * others_s / steps,
            rank_us=1e6 * named["rank-0"] / steps,
        )

    def _request(self, call: str, context: int) -> bytes:
        route, wanted = CALLS[call]
        prompt = [index % 1000 for index in range(context)]
        if route == "/generate":
            sampling = {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, **wanted}
        else:
            body = {"prompt": prompt, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True, **wanted}
        content = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content

    def _front_s(self) -> float:
        """CPU time of the frontend process so far: all its threads, in nanoseconds of the kernel's scheduler."""
        tasks = Path(f"/proc/{(self._folder / 'front').read_text()}/task")
        spent_ns = 0
        for task in tasks.iterdir():
            with suppress(OSError):
                spent_ns += int((task / "schedstat").read_text().split()[0])
        return spent_ns / 1e9

    async def _wait_idle(self) -> None:
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
            while sum((await http.get(f"{self._url}/server_info")).json()["states"].values()):
                await asyncio.sleep(0.05)


def chat_body() -> dict[str, Any]:
    """A chat with five tools and a schema, as agents send it."""
    text, number = {"type": "string", "description": "What to look for, in the words of the user."}, {"type": "integer"}
    place = {"type": "object", "properties": {"city": text, "country": text}, "required": ["city"]}
    parameters: list[dict[str, Any]] = [
        {"query": text, "limit": {**number, "minimum": 1, "maximum": 100}},
        {"place": place, "days": number, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        {"path": text, "lines": {"type": "array", "items": number, "maxItems": 2}},
        {"to": {"type": "array", "items": text}, "subject": text, "body": text},
        {"expression": text, "precise": {"type": "boolean"}},
    ]
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{at}",
                "description": "Does one thing, and says what it has done.",
                "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
            },
        }
        for at, properties in enumerate(parameters)
    ]
    schema = {
        "type": "object",
        "properties": {"answer": text, "places": {"type": "array", "items": place}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    return {
        "messages": [{"role": "user", "content": "What is the weather like?"}],
        "max_tokens": 1,
        "tools": tools,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }


def server_configs(model: Path, options: argparse.Namespace) -> tuple[PrefillConfig, DecodeConfig]:
    shared: dict[str, Any] = {"model": str(model), "load_format": "dummy", "device": "cpu", "page_size": PAGE_SIZE}
    longest, most = max(options.context) + MAX_NEW_TOKENS, max(options.streams)
    shared |= {"threads": 1, "max_queued_requests": 1024, "log_level": "warning", "tool_parser": "qwen3-coder"}
    prefill = PrefillConfig(**shared, port=free_port(), bootstrap_port=free_port(), kv_tokens=4 * longest)
    decode = DecodeConfig(
        local_prefill="never",
        **shared,
        port=free_port(),
        prefill=(f"127.0.0.1:{prefill.bootstrap_port}",),
        max_running_requests=most,
        kv_tokens=(most + 1) * longest,
    )
    return prefill, decode


def run(options: argparse.Namespace, screen: Console) -> list[Window]:
    """All windows, round by round; each in turn with the same one of the other checkout, if there is one."""
    windows: list[Window] = []
    trees = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as directory:
        children = Children(screen)
        try:
            benches = [_start(children, tree, Path(directory) / str(at), options) for at, tree in enumerate(trees)]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                streamed = [call for call in options.calls if call != CHAT]
                loads = list(itertools.product(options.context, options.streams, streamed))
                for _ in range(options.rounds):
                    works = [partial(Bench.window, call=call, streams=n, context=at) for at, n, call in loads]
                    works += [partial(Bench.chats)] if CHAT in options.calls else []
                    for work, bench in itertools.product(works, benches):
                        windows.append(runner.run(work(bench)))
                        screen.print(json.dumps(asdict(windows[-1])), soft_wrap=True)
        finally:
            children.stop(grace_s=15.0)
    return windows


def _start(children: Children, tree: Path, folder: Path, options: argparse.Namespace) -> Bench:
    """Start a pair of the code in a checkout, and wait until it is ready."""
    folder.mkdir()
    write_model(folder, MODEL, CHAT_TEMPLATE)
    prefill, decode = server_configs(folder, options)
    # only what is not the default: an older checkout may not have the other settings
    (folder / "decode.json").write_text(json.dumps(decode.model_dump(exclude_unset=True) | {"role": decode.role}))

    def environ(config: AnyServerConfig) -> dict[str, str]:
        path = ":".join(filter(None, (f"{tree}/.dev", str(tree), os.environ.get("PYTHONPATH"))))
        return server_environ(config) | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    paced = [sys.executable, "-m", "benchmarks.paced_server", "front", str(folder / "decode.json"), str(folder)]
    children.start(f"prefill {tree.name}", server_command(prefill), environ(prefill))
    children.start(f"decode {tree.name}", [*paced, str(options.step_ms)], environ(decode))
    wait_ready(children, [prefill, decode], timeout_s=120)
    return Bench(commit_of(tree), decode, folder, options)


def table_of(windows: Sequence[Window]) -> Table:
    table = Table(title="microseconds of CPU time, medians over the rounds")
    for field in fields(Window):
        table.add_column(field.name.removesuffix("_us"), justify="right", no_wrap=True)
    for (call, streams, context, commit), (steps, events, *costs) in medians(windows).items():
        load = (call, str(streams), str(context), commit)
        table.add_row(*load, f"{steps:.0f}", f"{events:.2f}", *(f"{cost:.1f}" for cost in costs))
    table.caption = "front (the frontend) per token, all others per step, of chats per chat"
    return table


def medians(windows: Sequence[Window]) -> dict[tuple[str, int, int, str], list[float]]:
    """By call, streams, context and commit: the other fields of Window, over the rounds."""
    names = [field.name for field in fields(Window)][4:]
    loads: dict[tuple[str, int, int, str], list[Window]] = {}
    for window in windows:
        loads.setdefault((window.call, window.streams, window.context, window.commit), []).append(window)
    return {
        load: [statistics.median(getattr(window, name) for window in found) for name in names]
        for load, found in loads.items()
    }


def figures_of(windows: Sequence[Window]) -> list[Figure]:
    """Of one checkout the costs of each call; of two the largest cost of a call relative to the older one."""
    by_load, older = medians(windows), windows[0].commit
    compares = windows[-1].commit != older
    figures: dict[str, Figure] = {}
    for (call, streams, context, commit), (_, _, front_us, engine_us, *_) in by_load.items():
        costs = {"the frontend, a token": front_us, "the engine, a step": engine_us}
        if commit == older:
            for of, value in costs.items() if not compares else ():
                name = f"{streams} x {call} after {context} tokens, CPU time of {of}"
                figures[name] = figure_of_this_run(name, value, "us")
            continue
        _, _, *before_us = by_load[call, streams, context, older]
        if call == CHAT:
            name = f"chat with 5 tools and a schema, CPU time of the frontend above {older}"
            figures[name] = figure_of_this_run(name, front_us - before_us[0], "us", target=MOST_ABOVE_US)
            continue
        for (of, value), before in zip(costs.items(), before_us, strict=False):
            name = f"{streams} streams, CPU time of {of} / at {older}, of the dearest call"
            dearest = max(value / before, figures[name].value if name in figures else 0)
            figures[name] = figure_of_this_run(name, dearest, "x", target=MOST_RATIO)
    return list(figures.values())


def main() -> int:
    options = _parse()
    screen = Console(stderr=True, highlight=False)
    try:
        windows = run(options, screen)
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(window) for window in windows], indent=2) + "\n")
    if options.record is not None:
        record(options.record, "What the host spends on two CPU cores", figures_of(windows))
    Console(highlight=False, width=120).print(table_of(windows))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams",
        type=_numbers,
        default=[1, 32, 128],
        metavar="N,N,...",
        help="requests at a time (default: 1,32,128)",
    )
    parser.add_argument("--context", type=_numbers, default=[64], metavar="N,N,...", help="prompt tokens (default: 64)")
    parser.add_argument(
        "--calls", type=_calls, default=list(CALLS), help=f"kinds of call, also {CHAT} (default: {','.join(CALLS)})"
    )
    parser.add_argument("--chats", type=int, default=500, help=f"{CHAT}s in each window (default: 500)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of another commit, measured in turn")
    parser.add_argument("--steps", type=int, default=100, help="steps measured in each window (default: 100)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time that a step waits (default: 20)")
    parser.add_argument("--rounds", type=int, default=1, help="how often to run all windows (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all windows to this file")
    parser.add_argument("--record", type=Path, metavar="FILE", help="put the medians into this file of results")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _calls(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in (*CALLS, CHAT)]:
        raise argparse.ArgumentTypeError(f"no such call: {', '.join(unknown)}; there are {', '.join((*CALLS, CHAT))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
