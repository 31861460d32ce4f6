"""`pdserve chat`: a conversation with a running server, streamed through /v1/chat/completions.

On a terminal it asks for messages, shows the reasoning of a model before its answer, and Ctrl-C stops an answer.
Otherwise every line of stdin is a message, and stdout has only the answers.
"""

import contextlib
import json
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TextIO

import httpx
from rich.console import Console

from ...common.errors import StartupError
from ...common.words import counted, whole_characters
from .options import NEEDS_KEY, WRONG_KEY, ChatOptions
from .tls import describe, open_client

CONNECT_TIMEOUT_S = 5.0
HELP = """\
/system TEXT   set the system message; without TEXT, remove it
/reset         forget the conversation
/quit          end; so does Ctrl-D
Ctrl-C stops an answer."""


class ChatError(Exception):
    """The server did not answer; the message is for the user."""


@dataclass
class Answer:
    """The part of an answer that has arrived. `is_reasoning`: the text that was printed last is reasoning."""

    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    is_reasoning: bool = False
    is_cut_off: bool = False


def run_chat(options: ChatOptions, stdin: TextIO = sys.stdin, stdout: TextIO = sys.stdout) -> int:
    """Returns exit code 0, or 1 when a message from a pipe was not answered. Raises StartupError if the server does not
    respond.
    """
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    with open_client((options.url,), options.tls, headers, timeout) as client:
        client.base_url = httpx.URL(options.url)
        model = served_model(client)
        chat = Chat(client, options, stdout)
        if stdin.isatty() and stdout.isatty():
            return _converse(chat, model)
        answered = True
        for line in stdin:
            if line.strip():
                answered &= chat.take(line.rstrip("\n"))
            if chat.ended:
                break
    return 0 if answered else 1


class Chat:
    """The conversation so far. `take` handles one line of the user."""

    def __init__(self, client: httpx.Client, options: ChatOptions, stdout: TextIO) -> None:
        self._client = client
        self._options = options
        self._stdout = stdout
        self._notes = Console(stderr=not stdout.isatty(), highlight=False, style="dim")
        self.system = None if options.system is None else whole_characters(options.system)
        self.messages: list[dict[str, str]] = []
        self.ended = False

    def take(self, line: str) -> bool:
        """Handle a line. Returns whether it was a known command, or a message that was answered. Ctrl-C ends an answer
        early.
        """
        line = whole_characters(line)  # replaces the surrogates that stand for bytes that are not UTF-8
        if not line.startswith("/"):
            return self._answer(line)
        command, _, rest = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                self.ended = True
            case "/reset":
                self.messages.clear()
                self.note("The conversation begins again.")
            case "/system":
                self.system = rest.strip() or None
                self.note("The system message is set." if self.system else "There is no system message.")
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"unknown command {command}\n{HELP}")
                return False
        return True

    def _answer(self, line: str) -> bool:
        self.messages.append({"role": "user", "content": line})
        answer = Answer()
        started = time.monotonic()
        try:
            with contextlib.closing(self._stream()) as events:
                for event in events:
                    usage = event.get("usage")
                    answer.tokens = usage["completion_tokens"] if usage else answer.tokens
                    for choice in event["choices"]:
                        answer.is_cut_off = choice["finish_reason"] == "length"
                        self._show(choice["delta"], answer, time.monotonic() - started)
        except KeyboardInterrupt:
            self.note("\n(stopped)")
            if not answer.text:
                self.messages.pop()
                return True
        except ChatError as error:
            self.messages.pop()  # the user may send it again
            self.note(f"{chr(10) if answer.text or answer.is_reasoning else ''}pdserve: error: {error}")
            return False
        self._stdout.write("\n")
        self._stdout.flush()
        self.messages.append({"role": "assistant", "content": answer.text})
        tokens = counted(answer.tokens, "token")
        if answer.is_cut_off:
            self.note(f"(cut off after {tokens}; --max-tokens N sets the limit)")
        if answer.tokens and self._stdout.isatty():
            after_s = time.monotonic() - started - answer.first_s
            rate = f", {(answer.tokens - 1) / after_s:.0f} tokens/s" if answer.tokens > 1 and after_s > 0 else ""
            self.note(f"{tokens}, the first after {answer.first_s:.2f} s{rate}\n")
        return True

    def _show(self, delta: dict[str, Any], answer: Answer, elapsed_s: float) -> None:
        """Print the new part of an answer. Reasoning is printed on a terminal only, not to a pipe."""
        reasoning, text = delta.get("reasoning_content"), delta.get("content")
        if reasoning or text:
            answer.first_s = answer.first_s or elapsed_s
        if reasoning and self._stdout.isatty():
            answer.is_reasoning = True
            self._notes.print(reasoning, end="", markup=False, soft_wrap=True)
        if text:
            answer.text += text
            self._stdout.write(f"\n\n{text}" if answer.is_reasoning else text)
            self._stdout.flush()
            answer.is_reasoning = False

    def _stream(self) -> Generator[dict[str, Any], None, None]:
        """Yields the events of one answer. Closing the generator closes the connection, which aborts the request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        limits = {"max_tokens": self._options.max_tokens, "temperature": self._options.temperature}
        body = {
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in limits.items() if value is not None},
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatError(_error_of(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data != line:
                        event: dict[str, Any] = json.loads(data)
                        if "error" in event:
                            raise ChatError(event["error"]["message"])
                        yield event
        except httpx.HTTPError as error:
            raise ChatError(f"{self._options.url}: {describe(error)}") from None
        raise ChatError("the stream ended before the answer did")

    def note(self, text: str) -> None:
        self._notes.print(text, markup=False)


def served_model(client: httpx.Client) -> str:
    """The name of the model; raises StartupError when the server cannot be asked."""
    try:
        response, health = client.get("/v1/models"), client.get("/health")
    except httpx.HTTPError as error:
        raise StartupError(
            f"no server answers at {client.base_url} ({describe(error)}); start one with 'pdserve up', or give --url"
        ) from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise StartupError(f"{client.base_url} {WRONG_KEY if 'Authorization' in client.headers else NEEDS_KEY}")
    if response.status_code != httpx.codes.OK:
        raise StartupError(f"{client.base_url}: {_error_of(response)}")
    if _role_of(health) == "prefill":
        raise StartupError(f"{client.base_url} is a prefill server: give the URL of the decode server")
    return str(response.json()["data"][0]["id"])


def _converse(chat: Chat, model: str) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history of input()
    chat.note(f"{model}  (/help lists commands, Ctrl-D ends)\n")
    while not chat.ended:
        try:
            line = input("> ")
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            chat.take(line)
    return 0


def _role_of(health: httpx.Response) -> str | None:
    """The role that pdserve reports in `/health`. Other servers may have an empty body there."""
    try:
        return str(health.json()["role"])
    except (ValueError, KeyError, TypeError):
        return None


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
