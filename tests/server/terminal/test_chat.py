"""`pdserve chat`: its requests, its output, and Ctrl-C. The server is real, its leader is scripted."""

import asyncio
import io
from collections.abc import Coroutine
from typing import Any

import pytest

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Submit, Tokens
from pdserve.server.cli import main
from pdserve.server.terminal.chat import run_chat
from pdserve.server.terminal.options import ChatOptions, TopOptions
from pdserve.server.terminal.top import run_top
from pdserve.server.text.tokenizer import Tokenizer
from tests.ports import free_port
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import make_finished


def options(server: RunningServer, system: str | None = None) -> ChatOptions:
    url = f"http://127.0.0.1:{server.port}"
    return ChatOptions(url, system, max_tokens=8, temperature=0.0, api_key=None)


def start(server: RunningServer, lines: str, out: io.StringIO, **named: Any) -> Coroutine[Any, Any, int]:
    return asyncio.to_thread(run_chat, options(server, **named), io.StringIO(lines), out)


async def answer(server: RunningServer, text: str, reason: FinishReason | None = None) -> str:
    """Answer the next request; returns its prompt."""
    submit = await server.leader.expect(Submit)
    await server.leader.send(Tokens(submit.rid, tuple(text.encode())), make_finished(submit.rid, len(text), reason))
    return bytes(submit.prompt_ids).decode()


async def test_conversation_has_history_and_system_message(decode: RunningServer) -> None:
    out = io.StringIO()
    chatting = asyncio.create_task(start(decode, "Hi\nAnd?\n/reset\n/system Be brief.\nWho?\n", out, system="Be kind."))
    prompts = [await answer(decode, text) for text in ("Hello!", "Nothing.", "Me.")]
    assert await chatting == 0
    assert out.getvalue() == "Hello!\nNothing.\nMe.\n"
    assert prompts == [
        "system: Be kind.\nuser: Hi\nassistant: ",
        "system: Be kind.\nuser: Hi\nassistant: Hello!\nuser: And?\nassistant: ",
        "system: Be brief.\nuser: Who?\nassistant: ",
    ]


@pytest.mark.parametrize("proxy", ["http", "socks5"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_proxy_is_not_used_for_a_server_on_this_machine(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch, host: str, proxy: str
) -> None:
    """A proxy on another machine cannot reach it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"{proxy}://127.0.0.1:{free_port()}")
    url, out = f"http://{host}:{decode.port}", io.StringIO()
    wanted = ChatOptions(url, None, max_tokens=8, temperature=0.0, api_key=None)
    chatting = asyncio.create_task(asyncio.to_thread(run_chat, wanted, io.StringIO("Hi\n"), out))
    top = TopOptions((url,), 0.1, once=True, api_key=None)
    await answer(decode, "Hello!")
    assert (await chatting, out.getvalue()) == (0, "Hello!\n")
    assert await asyncio.to_thread(run_top, top) == 0


def test_unusable_proxy_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheme that httpx does not know, or SOCKS without its package."""
    for name in ("all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "socks4://127.0.0.1:1")
    assert main(["top", "--once", "--url", "http://192.0.2.1:8200"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("pdserve: error: the proxy in the environment")
    assert message.count("\n") == 1


async def test_bytes_that_are_not_utf_8_are_replaced(decode: RunningServer) -> None:
    out = io.StringIO()
    chatting = asyncio.create_task(start(decode, "caf\udce9\n", out, system="\udcff"))
    assert await answer(decode, "Yes.") == "system: \ufffd\nuser: caf\ufffd\nassistant: "
    assert await chatting == 0


async def test_failed_message_is_reported_and_not_in_the_history(
    decode: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    chatting = asyncio.create_task(start(decode, "Hi\nAgain\n", out))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Failed(submit.rid, 503, "unavailable", "no prefill server is paired"))
    assert await answer(decode, "Yes.") == "user: Again\nassistant: "
    assert await chatting == 1
    assert out.getvalue() == "Yes.\n"
    assert "pdserve: error: no prefill server is paired" in capfd.readouterr().err


async def test_prefill_server_is_refused(prefill: RunningServer) -> None:
    with pytest.raises(StartupError, match="is a prefill server: give the URL of the decode server"):
        await start(prefill, "Hi\n", io.StringIO())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
async def test_reasoning_is_shown_on_a_terminal_only(
    kind: type[io.StringIO], tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_server(tokenizer, DecodeConfig(reasoning_parser="qwen3")) as server:
        out = kind()
        chatting = asyncio.create_task(start(server, "Hi\nAnd?\n", out))
        await answer(server, "<think>Be kind.</think>Hello!")
        assert await answer(server, "<think>So") == "user: Hi\nassistant: Hello!\nuser: And?\nassistant: "
        assert await chatting == 0
    notes = "".join(capfd.readouterr())
    if kind is Terminal:
        assert out.getvalue() == "\n\nHello!\n\n"
        assert "Be kind." in notes
        assert "So" in notes
    else:
        assert out.getvalue() == "Hello!\n\n"
        assert "Be kind." not in notes


async def test_truncated_answer_is_noted(decode: RunningServer, capfd: pytest.CaptureFixture[str]) -> None:
    chatting = asyncio.create_task(start(decode, "Hi\nAnd?\n", io.StringIO()))
    await answer(decode, "Yes.", FinishReason("stop", matched=256))
    await answer(decode, "Well", FinishReason("length", length=4))
    assert await chatting == 0
    assert capfd.readouterr().err.splitlines() == ["(cut off after 4 tokens; --max-tokens N sets the limit)"]


class Interrupts(io.StringIO):
    """Standard output that raises KeyboardInterrupt when the text `at` is written."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def write(self, text: str) -> int:
        if self._at in text:
            raise KeyboardInterrupt
        return super().write(text)


async def test_ctrl_c_stops_the_answer_and_aborts_the_request(decode: RunningServer) -> None:
    out = Interrupts("stop")
    chatting = asyncio.create_task(start(decode, "Count\nGo on\n", out))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Tokens(submit.rid, tuple(b"one ")))
    await asyncio.sleep(0)
    await decode.leader.send(Tokens(submit.rid, tuple(b"stop")))
    # the server may see the next request before it notices the closed connection of this one
    messages = [await decode.leader.expect((Cancel, Submit)) for _ in range(2)]
    (cancel,) = [message for message in messages if isinstance(message, Cancel)]
    (second,) = [message for message in messages if isinstance(message, Submit)]
    assert cancel.rid == submit.rid
    await decode.leader.send(Failed(submit.rid, 499, "aborted", "aborted"))
    await decode.leader.send(Tokens(second.rid, tuple(b"two")), make_finished(second.rid, 3))
    prompt = bytes(second.prompt_ids).decode()
    assert prompt.startswith("user: Count\nassistant: ")
    assert prompt.endswith("\nuser: Go on\nassistant: ")
    assert await chatting == 0
    assert out.getvalue().endswith("two\n")


async def test_quit_and_unknown_commands(decode: RunningServer, capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    assert await start(decode, "/sytem x\n", out) == 1
    assert "unknown command /sytem" in capfd.readouterr().err
    assert await start(decode, "/quit\nHi\n", out) == 0
    await decode.leader.expect_nothing()


def test_missing_server_is_reported_with_a_suggestion() -> None:
    nowhere = ChatOptions(f"http://127.0.0.1:{free_port()}", None, None, None, None)
    with pytest.raises(
        StartupError, match=r"no server answers at http://127.0.0.1:\d+ .*; start one with 'pdserve up'"
    ):
        run_chat(nowhere, io.StringIO("Hi\n"), io.StringIO())


@pytest.mark.parametrize(
    "flags", [["--temperature", "nan"], ["--temperature", "inf"], ["--temperature=-1"], ["--max-tokens", "0"]]
)
def test_flags_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", f"http://127.0.0.1:{free_port()}", *flags]) == 2
    assert f"{flags[0].partition('=')[0]} must be" in capsys.readouterr().err
