"""`pdserve demo`: start the pair, ask it one question, stream the answer, show the time of each stage."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from ...common.words import counted
from ...configs.flags import to_flags
from ...configs.schema import DecodeConfig
from ...models.loading.catalog import locate_model
from ..observability.stages import STAGES
from ..text.tokenizer import load_tokenizer
from .children import ChildEndedError
from .pair import PairConfig
from .up import NotReadyError, RunningPair, banner, curl_command, running_pair

REQUEST_TIMEOUT_S = 120.0
BAR_WIDTH = 18


class Answer(NamedTuple):
    """The metadata of the finished answer, and two times that the client has measured."""

    meta_info: Mapping[str, Any]  # Any: JSON from the server
    first_text_s: float
    total_s: float


class DemoError(Exception):
    """The pair has started but could not answer the question; the message is the server's."""

    exit_code = 1


def run_demo(config: PairConfig, *, question: str, max_new_tokens: int, keep: bool) -> int:
    """Returns exit code 0 when the pair has answered the question. With `keep`, the pair then runs until Ctrl-C."""
    decode = config.decode.model_copy(update={"local_prefill": "never"})  # the question goes through both servers
    config, answered = config._replace(decode=decode), False
    try:
        with running_pair(config, Console(stderr=True, highlight=False)) as pair:
            prompt = chat_prompt(pair.config.decode, question)
            pair.wait_ready()
            with pair.children.logs_held():
                out = Console(highlight=False)
                out.print(f"\n{question}\n", style="bold", markup=False)
                answer = ask(pair, prompt, max_new_tokens)
                out.print("\n", timeline_table(answer))
            answered = True
            if keep:
                print("\n".join(banner(config)), flush=True)
                pair.watch()
            else:
                print(
                    f"\nTo ask it yourself:\n  {up_command(config)}\n  {curl_command(config, 'The sky is')}", flush=True
                )
    except KeyboardInterrupt:
        return 0 if answered else 130
    except (ChildEndedError, NotReadyError, DemoError) as error:
        print(f"pdserve: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def up_command(config: PairConfig) -> str:
    """The shell command that starts the same pair. It names the program as this process was started if `pdserve` is not
    on the PATH: `make demo` runs it from .venv, and `python -m pdserve.server` needs no installation.
    """
    program = [sys.executable, "-m", "pdserve.server"] if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
    if shutil.which("pdserve") is not None:
        program = ["pdserve"]
    flags = [flag for flag in to_flags(config.decode) if flag.startswith(("--model=", "--port="))]
    ports = [flag for flag in to_flags(config.prefill) if flag.startswith(("--port=", "--bootstrap-port="))]
    flags += [flag.replace("--port=", "--prefill-port=") for flag in ports]
    return shlex.join([*program, "up", *flags])


def chat_prompt(config: DecodeConfig, question: str) -> str:
    """The question in the model's chat template, or unchanged for a model without one."""
    tokenizer = load_tokenizer(locate_model(config.model, config.load_format))
    if not tokenizer.has_chat_template:
        return question
    return tokenizer.render_chat([{"role": "user", "content": question}])


def ask(pair: RunningPair, prompt: str, max_new_tokens: int) -> Answer:
    """Stream one greedy answer to stdout. Raises DemoError with the server's message when it fails."""
    body = {
        "text": prompt,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0},
        "stream": True,
    }
    started = time.monotonic()
    first_text_s = 0.0
    shown = ""
    meta_info: Mapping[str, Any] = {}
    try:
        with (
            pair.client(REQUEST_TIMEOUT_S) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise DemoError(f"/generate returned {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise DemoError(event["error"]["message"])
                first_text_s = first_text_s or time.monotonic() - started
                sys.stdout.write(event["text"][len(shown) :])
                sys.stdout.flush()
                shown, meta_info = event["text"], event["meta_info"]
    except httpx.HTTPError as error:
        raise DemoError(f"/generate: {type(error).__name__}: {error}") from None
    if meta_info.get("finish_reason") is None:
        raise DemoError("/generate: the stream ended before the answer did")
    return Answer(meta_info, first_text_s, time.monotonic() - started)


def timeline_table(answer: Answer) -> Table:
    """A table with the time of each stage, as the server has measured it."""
    timeline: Mapping[str, float] = answer.meta_info["timeline"]
    prompt_tokens, tokens = answer.meta_info["prompt_tokens"], answer.meta_info["completion_tokens"]
    total_s = sum(timeline.values())
    decode_s = timeline.get("decode", 0.0)
    rate = f", {(tokens - 1) / decode_s:.0f} tokens/s" if tokens > 1 and decode_s > 0 else ""
    total_ms = answer.total_s * 1000
    table = Table(
        title=f"{counted(prompt_tokens, 'prompt token')}, {counted(tokens, 'new token')} in {total_ms:.0f} ms",
        caption=f"first text after {answer.first_text_s * 1000:.0f} ms{rate}",
    )
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("share")
    table.add_column("what it is", style="dim")
    for stage, seconds in timeline.items():
        bar = "\u2588" * round(BAR_WIDTH * seconds / total_s) if total_s > 0 else ""
        table.add_row(stage.replace("_", " "), f"{seconds * 1000:.1f}", bar, STAGES.get(stage, ""))
    return table
