"""`pdserve top`: one frame of servers with and without work."""

import asyncio
import io

import pytest
from pydantic import SecretStr
from rich.console import Console

from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.scheduler.messages.frontend import Failed, Finished, FinishReason, PeerStatus, Status, Submit, Tokens
from pdserve.server.terminal.options import TopOptions
from pdserve.server.terminal.top import Sample, frame, run_top
from pdserve.server.text.tokenizer import Tokenizer
from tests.ports import free_port
from tests.server.http_harness import RunningServer, running_server

START = 1_800_000_100.0
PEER = PeerStatus("10.0.0.5:8998", "paired", "i-2", None, 0.42, {"kv": "tcp"})


def report(after_s: float, generated: int) -> Status:
    gauges = {
        "kv_pages": 200.0,
        "kv_pages_held": 86.0,
        "cached_pages": 50.0,
        "hot_pages": 64.0,
        "hot_pages_available": 48.0,
        "staging_ring_bytes": float(64 << 20),
        "staging_ring_bytes_granted": float(16 << 20),
        "waiting_tokens": 640.0,
    }
    counters = {
        "prompt_tokens": 10.0 * generated,
        "generation_tokens": float(generated),
        "transfer_bytes": 1e7 * after_s,
    }
    states = {"running": 3, "queued": 2, "prefilling": 1, "computing": 2, "waiting": 4, "sending": 1}
    return Status(gauges, counters, (PEER,), states, START + after_s, 0.0)


def shown(earlier: list[Sample], later: list[Sample]) -> str:
    out = io.StringIO()
    Console(file=out, width=110).print(frame(earlier, later))
    return out.getvalue()


async def sample(server: RunningServer, status: Status) -> Sample:
    await server.report(status)
    return Sample("http://server", (await server.http.get("/server_info")).json())


async def test_frame_of_a_decode_server_has_rates_pools_peers_and_requests(decode: RunningServer) -> None:
    posting = asyncio.create_task(decode.http.post("/generate", json={"text": "abc", "rid": "first"}))
    await decode.leader.expect(Submit)
    timeline = {"queue": 0.0, "prefill": 0.5, "transfer": 0.25, "decode": 1.25}
    ended = Finished("first", FinishReason("stop", 256), 812, 64, 800, timeline, "device")
    await decode.leader.send(Tokens("first", (65,)), ended)
    await posting
    text = shown([await sample(decode, report(0, 0))], [await sample(decode, report(2, 100))])
    for expected in (
        "decode  http://server  bytes  ready",
        "3 running   3 in prefill   2 waiting",
        "500.0 in   50.0 out",
        "10 MB/s",
        "43%  86 of 200 pages",
        "25%  16 of 64 pages",
        "25%  16 of 64 MiB",
        "10.0.0.5:8998  paired  0.4 ms  tcp",
    ):
        assert expected in text
    (row,) = [line for line in text.splitlines() if line.startswith("first")]
    assert row.split()[:5] == ["first", "stop", "812", "800", "64"]
    assert "█" in row


async def test_frame_of_a_prefill_server_has_its_queue(prefill: RunningServer) -> None:
    text = shown([await sample(prefill, report(0, 0))], [await sample(prefill, report(2, 100))])
    assert "2 computing   1 sending   4 waiting (640 tokens to compute)" in text
    assert "500.0 computed" in text


async def test_rates_are_left_out_without_a_newer_report(decode: RunningServer) -> None:
    same = await sample(decode, report(0, 0))
    text = shown([same], [same])
    assert "tokens/s" not in text
    assert "86 of 200 pages" in text


async def test_failed_request_shows_its_error(decode: RunningServer) -> None:
    posting = asyncio.create_task(decode.http.post("/generate", json={"text": "abc", "rid": "r1"}))
    await decode.leader.expect(Submit)
    await decode.leader.send(Failed("r1", 503, "unavailable", "no prefill server is paired"))
    await posting
    now = await sample(decode, report(0, 0))
    assert "unavailable" in shown([now], [now])


async def test_once_prints_one_frame_of_servers_that_answer(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DecodeConfig(api_key=SecretStr("key"))
    async with running_server(tokenizer, config) as decode, running_server(tokenizer, PrefillConfig()) as prefill:
        nowhere = f"http://127.0.0.1:{free_port()}"
        urls = (f"http://127.0.0.1:{decode.port}", f"http://127.0.0.1:{prefill.port}", nowhere)
        assert await asyncio.to_thread(run_top, TopOptions(urls, 0.1, True, "key")) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("decode", "prefill", f"{nowhere}  no data"))
        assert await asyncio.to_thread(run_top, TopOptions(urls[:1], 0.1, True, None)) == 1
        assert "needs an API key: set PDSERVE_API_KEY" in capsys.readouterr().out
        assert await asyncio.to_thread(run_top, TopOptions(urls[:1], 0.1, True, "wrong")) == 1
        assert "refuses the API key in PDSERVE_API_KEY" in capsys.readouterr().out
