"""The live page in headless Chromium (`make test-page`): light and dark, idle and busy, on a desktop and on a phone.

PDSERVE_CHROMIUM is the path of the program. Screenshots are written to the folder PDSERVE_SCREENSHOTS, if it is set.
"""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from pydantic import SecretStr

from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import (
    Cancel,
    Failed,
    Finished,
    FinishReason,
    PeerStatus,
    Status,
    Submit,
    Tokens,
)
from pdserve.server.text.tokenizer import Tokenizer
from tests.chromium import Browser, chromium
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import make_finished

CHROMIUM = os.environ.get("PDSERVE_CHROMIUM")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: run `make test-page`")

START = 1_800_000_100.0
PEERS = (
    PeerStatus("10.0.0.5:8998", "paired", "i-2", None, 0.42, {"kv": "rdma"}),
    PeerStatus("10.0.0.6:8998", "connecting", None, "connection refused: nothing listens there"),
)


def report(step: int, *, busy: bool) -> Status:
    gauges = {
        "kv_pages": 4096.0,
        "kv_pages_held": 1720.0 if busy else 0.0,
        "cached_pages": 900.0,
        "hot_pages": 512.0,
        "hot_pages_available": 130.0 if busy else 512.0,
        "staging_ring_bytes": float(128 << 20),
        "staging_ring_bytes_granted": float(40 << 20) if busy else 0.0,
    }
    rate = step * step if busy else 0
    counters = {
        "prompt_tokens": 4000.0 * rate,
        "prefix_tokens_reused": 1500.0 * rate,
        "generation_tokens": 310.0 * rate,
        "transfer_bytes": 2.1e8 * rate,
        "hot_hits": 9800.0 * rate,
        "hot_misses": 130.0 * rate,
    }
    states = {"queued": 4, "prefilling": 3, "arrived": 1, "ready": 0, "running": 12} if busy else {"running": 0}
    return Status(gauges, counters, PEERS, states, START + step, 0.0)


async def shoot(browser: Browser, name: str) -> None:
    if folder := os.environ.get("PDSERVE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        await browser.screenshot(Path(folder) / f"{name}.png")


async def report_until(server: RunningServer, browser: Browser, condition: str) -> None:
    """Send reports of a busy server until the page shows them."""
    async with asyncio.timeout(60):
        for step in range(1, 1000):
            await server.report(report(step, busy=True))
            if step > 8 and await browser.evaluate(condition):
                return
            await asyncio.sleep(0.25)


async def run_requests(server: RunningServer) -> None:
    for number, scale in enumerate((1.0, 0.4, 2.2, 0.9, 1.6, 0.7)):
        rid = f"request-{number}"
        posting = asyncio.create_task(server.http.post("/generate", json={"text": "abc", "rid": rid}))
        await server.leader.expect(Submit)
        timeline = {"queue": 0.1 * scale, "prefill": 0.4 * scale, "transfer": 0.1 * scale, "decode": scale}
        end = Finished(rid, FinishReason("stop", 256), 800, 64, 320, timeline, "device")
        await server.leader.send(Tokens(rid, (65,)), Failed(rid, 503, "unavailable", "lost") if number == 3 else end)
        await posting


async def test_page_shows_a_server_with_and_without_work(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    async with running_server(tokenizer) as server, chromium(CHROMIUM, tmp_path) as browser:
        await server.report(report(0, busy=False))
        await browser.open(f"http://127.0.0.1:{server.port}/")
        await browser.colours("light")
        await browser.wait_for("document.getElementById('status').textContent === 'ready'")
        height = await browser.evaluate("document.getElementById('main').offsetHeight")
        await shoot(browser, "idle-light")
        await browser.colours("dark")
        await shoot(browser, "idle-dark")

        await run_requests(server)
        await report_until(server, browser, "document.querySelector('[data-key=running] strong').textContent === '12'")
        await browser.wait_for("document.querySelectorAll('#recent tr:not(.empty)').length === 6")
        assert await browser.evaluate("document.querySelectorAll('#recent .bad-text').length") == 1
        assert await browser.evaluate("document.getElementById('main').offsetHeight") == height, (
            "the layout must not jump"
        )
        await shoot(browser, "busy-dark")
        await browser.colours("light")
        await shoot(browser, "busy-light")
        await browser.resize(390, 1400)
        assert await browser.evaluate("document.documentElement.scrollWidth") == 390, (
            "the page must not be wider than a phone"
        )
        await shoot(browser, "busy-phone")
        assert browser.errors == []


async def test_chat_box_streams_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    async with running_server(tokenizer) as server, chromium(CHROMIUM, tmp_path) as browser:
        await server.report(report(0, busy=False))
        await browser.open(f"http://127.0.0.1:{server.port}/")
        await browser.wait_for("document.getElementById('status').textContent === 'ready'")
        send = "document.getElementById('chat-form').requestSubmit()"
        await browser.evaluate(f"document.getElementById('message').value = '<b>Hi</b>'; {send}")
        submit = await server.leader.expect(Submit)
        assert bytes(submit.prompt_ids).decode() == "user: <b>Hi</b>\nassistant: "
        await server.leader.send(Tokens(submit.rid, tuple(b"Hello <i>you</i>")), make_finished(submit.rid, 16))
        answer = "document.querySelector('.messages .assistant')?.textContent"
        await browser.wait_for(f"{answer} === 'Hello <i>you</i>'")
        assert browser.errors == []


async def test_reset_during_an_answer_forgets_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    async with running_server(tokenizer) as server, chromium(CHROMIUM, tmp_path) as browser:
        await server.report(report(0, busy=False))
        await browser.open(f"http://127.0.0.1:{server.port}/")
        await browser.wait_for("document.getElementById('status').textContent === 'ready'")
        send = "document.getElementById('chat-form').requestSubmit()"
        await browser.evaluate(f"document.getElementById('message').value = 'Hi'; {send}")
        submit = await server.leader.expect(Submit)
        await server.leader.send(Tokens(submit.rid, tuple(b"Hel")))
        await browser.wait_for("document.querySelector('.messages .assistant')?.textContent === 'Hel'")
        await browser.evaluate("document.getElementById('reset').click()")
        await server.leader.expect(Cancel)
        await browser.wait_for("document.getElementById('send').textContent === 'Send'")
        await browser.evaluate(f"document.getElementById('message').value = 'Bye'; {send}")
        assert bytes((await server.leader.expect(Submit)).prompt_ids).decode() == "user: Bye\nassistant: "
        assert browser.errors == []


async def test_chat_box_shows_reasoning_before_the_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    config = DecodeConfig(reasoning_parser="qwen3")
    async with running_server(tokenizer, config) as server, chromium(CHROMIUM, tmp_path) as browser:
        await server.report(report(0, busy=False))
        await browser.open(f"http://127.0.0.1:{server.port}/")
        await browser.wait_for("document.getElementById('status').textContent === 'ready'")
        send = "document.getElementById('chat-form').requestSubmit()"
        await browser.evaluate(f"document.getElementById('message').value = 'Hi'; {send}")
        submit = await server.leader.expect(Submit)
        text = b"<think>Be kind.</think>Hello"
        await server.leader.send(Tokens(submit.rid, tuple(text)), make_finished(submit.rid, len(text)))
        shown = "document.querySelector('.messages .{}')?.textContent"
        await browser.wait_for(f"{shown.format('assistant')} === 'Hello'")
        assert await browser.evaluate(f"{shown.format('reasoning')} === 'Be kind.'")
        assert "cut off" in str(await browser.evaluate(shown.format("note")))
        assert browser.errors == []


async def test_page_asks_for_the_api_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    config = DecodeConfig(api_key=SecretStr("key"))
    async with running_server(tokenizer, config) as server, chromium(CHROMIUM, tmp_path) as browser:
        await server.report(msgspec.structs.replace(report(0, busy=False), peers=()))
        await browser.open(f"http://127.0.0.1:{server.port}/")
        await browser.wait_for("!document.getElementById('key-form').hidden")
        assert await browser.evaluate("document.getElementById('main').hidden")
        await shoot(browser, "locked")
        form = "document.getElementById('key-form').requestSubmit()"
        await browser.evaluate(f"document.getElementById('key').value = 'key'; {form}")
        await browser.wait_for("document.getElementById('status').textContent === 'ready'")
        assert not await browser.evaluate("document.getElementById('main').hidden")
