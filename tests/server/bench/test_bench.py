"""`pdserve bench`: its statistics, its client and its command against the real frontend."""

import asyncio
import dataclasses
import io
import json
import math
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from rich.console import Console

from pdserve.common.errors import StartupError
from pdserve.scheduler.messages.frontend import Cancel, Failed, Finished, FinishReason, Submit, Tokens
from pdserve.server.bench.client import BenchClient, RequestRecord
from pdserve.server.bench.command import arrival_times_s, measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.plot import check_plot, draw, picture
from pdserve.server.bench.prompts import ModelLimits, make_workload, read_sharegpt
from pdserve.server.bench.report import BenchResult, report, to_json
from pdserve.server.bench.summary import Distribution, summarize
from pdserve.server.observability.stages import STAGES
from pdserve.server.text.tokenizer import Tokenizer
from tests.cluster.servers import ForkedCommand
from tests.server.http_harness import RunningServer, load_byte_tokenizer, running_server
from tests.server.scripted_leader import EOS, VOCAB_SIZE

LIMITS = ModelLimits(vocab_size=VOCAB_SIZE, special_token_ids=frozenset({EOS}), max_total_tokens=400)
TIMELINE = {"queue": 0.001, "prefill": 0.02, "transfer": 0.004, "decode": 0.3}
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(tmp_path_factory.mktemp("model"))


def finished(rid: str, tokens: int) -> Finished:
    reason = FinishReason("length", length=tokens)
    return Finished(rid, reason, prompt_tokens=5, completion_tokens=tokens, cached_tokens=3, timeline=TIMELINE)


@asynccontextmanager
async def answering(
    tokenizer: Tokenizer, answer: Callable[[Submit, int], Sequence[Tokens | Finished | Failed]]
) -> AsyncIterator[RunningServer]:
    """The real frontend; `answer` returns the messages that the leader sends for the n-th request."""
    async with running_server(tokenizer) as server:

        async def lead() -> None:
            count = 0
            while True:
                submit = await server.leader.expect(Submit, within_s=60)
                for message in answer(submit, count):
                    await server.leader.send(message)
                    await asyncio.sleep(0.002)
                count += 1

        leading = asyncio.create_task(lead())
        try:
            yield server
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)


def complete(submit: Submit, _index: int) -> list[Tokens | Finished | Failed]:
    asked = submit.sampling.max_new_tokens
    return [*(Tokens(submit.rid, (104,)) for _ in range(asked)), finished(submit.rid, asked)]


# figures


def test_distribution_has_count_mean_percentiles_and_maximum() -> None:
    """Percentiles are interpolated linearly between the two nearest values."""
    assert Distribution.of([3.0, 1.0]) == Distribution(2, 2.0, p50=2.0, p90=2.8, p95=2.9, p99=2.98, max=3.0)
    assert Distribution.of(float(value) for value in range(101)) == Distribution(
        101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0
    )
    assert Distribution.of([7.0]) == Distribution(1, *[7.0] * 6)
    assert Distribution.of([]) is None


def test_tokens_of_one_event_share_its_latency() -> None:
    """Two tokens in the first event, three in the next: each of the three gets a third of the time between them."""
    record = RequestRecord(0.0, 1.3, [(0.5, 2), (0.8, 5), (1.2, 6)])
    assert record.ttft_s == 0.5
    assert record.itl_s == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.4])
    assert record.tpot_s == pytest.approx(0.7 / 5)
    assert record.tpot_s == pytest.approx(np.mean(record.itl_s))
    single = RequestRecord(0.0, 0.6, [(0.5, 1)])
    assert (single.itl_s, single.tpot_s) == ([], None)


def random_records(count: int) -> list[RequestRecord]:
    source = random.Random(2)
    records = []
    for index in range(count):
        times = np.cumsum([source.uniform(0.1, 1.0), *(source.uniform(0.01, 0.1) for _ in range(7))]).tolist()
        arrivals = [(at, tokens + 1) for tokens, at in enumerate(times)]
        failure = ("503 unavailable", "timeout")[index % 2] if index % 5 == 0 else None
        timeline = {"prefill": source.random(), "transfer": source.random() / 10, "decode": source.random()}
        records.append(
            RequestRecord(0.0, times[-1], arrivals, 10, 4, timeline=timeline, failure=failure, detail="because")
        )
    return records


def test_summary_counts_only_successful_requests() -> None:
    records = random_records(50)
    ok = [record for record in records if record.failure is None]
    summary = summarize(records, 4.0, unfinished=2, slo_ttft_s=0.5, slo_itl_s=0.05)
    assert (summary.ok, summary.failed, summary.unfinished) == (40, 10, 2)
    assert summary.failures == {"503 unavailable": 5, "timeout": 5}
    assert summary.requests_per_s == 40 / 4.0
    assert (summary.input_tokens, summary.cached_tokens, summary.output_tokens) == (400, 160, 320)
    assert summary.output_tokens_per_s == 80.0
    assert summary.ttft_s is not None
    ttfts = [record.arrivals[0][0] for record in ok]
    assert summary.ttft_s.p95 == pytest.approx(np.percentile(ttfts, 95))
    assert summary.itl_s is not None
    gaps = np.concatenate([np.diff([at for at, _ in record.arrivals]) for record in ok])
    assert summary.itl_s.p99 == pytest.approx(np.percentile(gaps, 99))
    assert summary.itl_s.count == 40 * 7
    transfers = [record.timeline["transfer"] for record in ok]
    assert summary.stages_s["transfer"].p95 == pytest.approx(np.percentile(transfers, 95))
    assert summary.transfer_share_of_ttft == pytest.approx(np.sum(transfers) / np.sum(ttfts))
    good = [
        record
        for record in ok
        if record.arrivals[0][0] <= 0.5 and np.mean(np.diff([at for at, _ in record.arrivals])) <= 0.05
    ]
    assert summary.goodput is not None
    assert 0 < summary.goodput.good == len(good) < 40
    assert summary.goodput.requests_per_s == pytest.approx(len(good) / 4.0)
    assert summary.goodput.share == pytest.approx(len(good) / 50), "failed requests are in the denominator"


def test_summary_without_records_is_empty() -> None:
    summary = summarize([], 0.0, slo_ttft_s=1.0)
    assert (summary.ok, summary.failed, summary.requests_per_s, summary.ttft_s) == (0, 0, 0.0, None)
    assert summary.goodput is not None
    assert summary.goodput.share == 0.0


def colors_of(axes: Axes) -> dict[str, str]:
    """The colour of each stage of a bar chart."""
    bars = [bar for bar in axes.containers if isinstance(bar, BarContainer)]
    return {str(bar.get_label()): str(bar.patches[0].get_facecolor()) for bar in bars}


def test_plot_has_a_color_for_every_stage_and_a_title() -> None:
    timeline = dict.fromkeys(STAGES, 0.1)
    records = [dataclasses.replace(record, timeline=timeline) for record in random_records(10)]
    options = BenchOptions(input_len=20, output_len=10, range_ratio=0.5, prefix_len=7, concurrency=3)
    result = BenchResult(
        options=options,
        command="",
        started_at=datetime.now(UTC),
        model_info={"served_model_name": "tiny"},
        server_info={},
        records=records,
        summary=summarize(records, 4.0),
        client_cpu_s=0.0,
        interrupted=False,
    )
    drawn = picture(result)
    *cdfs, to_first_token, whole = drawn.get_axes()
    for axes in (*cdfs, to_first_token, whole):
        assert axes.get_xlim()[0] == 0
    assert all(axes.get_ylim() == (0, 1) for axes in cdfs)
    colors = colors_of(whole)
    assert {label.replace(" ", "_") for label in colors} == set(STAGES)
    assert len(set(colors.values())) == len(STAGES)
    assert colors_of(to_first_token).items() <= colors.items(), "a stage has the same colour in both charts"
    measured, outcome = drawn.get_suptitle().splitlines()
    assert measured == "tiny: 7 shared + 20 tokens in, 10 out (each \u00b150%), 3 at a time"
    assert outcome.startswith("8 requests ok, 2 failed: ")


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (BenchOptions(), "256 tokens in, 64 out"),
        (BenchOptions(dataset="sharegpt", dataset_path=Path("x"), output_len=7), "sharegpt prompts, 7 tokens out"),
    ],
)
def test_options_describe_their_lengths(options: BenchOptions, lengths: str) -> None:
    assert options.lengths == lengths


# prompts


def test_random_prompts_have_the_requested_lengths() -> None:
    options = BenchOptions(requests=200, warmup=3, input_len=20, output_len=10, range_ratio=0.5, prefix_len=7, seed=5)
    workload = make_workload(options, LIMITS)
    assert workload == make_workload(options, LIMITS), "the same seed gives the same prompts"
    prompts = [prompt.content for prompt in workload.measured if isinstance(prompt.content, list)]
    assert len(prompts) == 200
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1, "a shared prefix"
    assert len({tuple(prompt[7:12]) for prompt in prompts}) == 200, "and nothing else in common"
    assert {len(prompt) for prompt in prompts} == set(range(17, 38)), "7 + [10, 30], both ends drawn"
    assert {prompt.output_len for prompt in workload.measured} == set(range(5, 16))
    drawn = {token for prompt in prompts for token in prompt}
    assert drawn == set(range(VOCAB_SIZE)) - {EOS}
    assert all(warmup.content[:7] != prompts[0][:7] for warmup in workload.warmup), (
        "warm-up does not put the shared prefix into the cache"
    )


def test_requests_that_are_too_long_are_refused_before_the_run() -> None:
    options = BenchOptions(input_len=200, output_len=100, range_ratio=0.5)
    with pytest.raises(StartupError, match=r"up to 450 tokens a request .* holds 400"):
        make_workload(options, LIMITS)


def test_sharegpt_prompts_are_first_human_turns(tmp_path: Path) -> None:
    def turns(*values: tuple[str, str]) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": value} for who, value in values]}

    path = tmp_path / "sharegpt.json"
    data = [
        turns(("human", "Hello"), ("gpt", "Hi"), ("human", "more")),
        turns(("gpt", "continued"), ("human", "from elsewhere")),
        turns(("human", "unanswered")),
        turns(("human", ""), ("gpt", "?")),
        turns(("human", "\u00e4" * 26), ("gpt", "52 bytes")),
        turns(("human", "Bye"), ("gpt", "Bye")),
        {"items": []},
    ]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert read_sharegpt(path, 51) == ["Hello", "Bye"]
    options = BenchOptions(dataset="sharegpt", dataset_path=path, requests=1, warmup=1)
    workload = make_workload(options, LIMITS)
    assert {workload.warmup[0].content, workload.measured[0].content} <= {"Hello", "Bye", "\u00e4" * 26}
    with pytest.raises(StartupError, match=r"3 usable conversations, but --warmup \+ --requests are 4"):
        make_workload(BenchOptions(dataset="sharegpt", dataset_path=path, requests=3, warmup=1), LIMITS)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(StartupError, match="expected a JSON list"):
        read_sharegpt(path, 51)


def test_arrivals_follow_a_poisson_process() -> None:
    times = arrival_times_s(4001, BenchOptions(concurrency=None, rate_per_s=50.0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.1), "exponential gaps: the standard deviation equals the mean"
    assert arrival_times_s(3, BenchOptions(concurrency=None, rate_per_s=math.inf)) == [0.0, 0.0, 0.0]


# runs


@pytest.mark.parametrize(("concurrency", "rate_per_s"), [(3, None), (None, 200.0)])
async def test_run_against_the_real_frontend(
    tokenizer: Tokenizer, tmp_path: Path, concurrency: int | None, rate_per_s: float | None
) -> None:
    async with answering(tokenizer, complete) as server:
        options = BenchOptions(
            url=f"http://127.0.0.1:{server.port}",
            requests=8,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            warmup=1,
            input_len=5,
            output_len=6,
        )
        result = await measure(options, QUIET, command="the command")
    summary = result.summary
    assert (summary.ok, summary.failed, summary.failures, result.interrupted) == (8, 0, {}, False)
    assert (summary.input_tokens, summary.output_tokens) == (40, 48)
    assert all(
        record.output_tokens == 6 and record.ttft_s <= record.e2e_s for record in result.records if record.ttft_s
    )
    assert summary.itl_s is not None
    assert summary.itl_s.count == 40
    assert list(summary.stages_s) == list(TIMELINE)
    assert summary.stages_s["transfer"].mean == pytest.approx(0.004)
    assert result.client_cpu_s > 0

    document = json.loads(to_json(result))
    assert document["command"] == "the command"
    assert document["summary"]["ok"] == len(document["requests"]) == 8
    assert document["summary"]["ttft_s"]["p50"] == pytest.approx(
        np.median([request["ttft_s"] for request in document["requests"]]), abs=1e-5
    )
    assert document["server_info"]["disaggregation_mode"] == "decode"
    assert document["host"]["cpus"] == os.cpu_count()

    picture = tmp_path / "run.png"
    check_plot(picture)
    draw(result, picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


async def test_failures_are_counted_by_reason(tokenizer: Tokenizer) -> None:
    def answer(submit: Submit, index: int) -> list[Tokens | Finished | Failed]:
        match index:
            case 1:
                return [Failed(submit.rid, 503, "unavailable", "no prefill server")]
            case 2:
                return [Tokens(submit.rid, (104,)), Failed(submit.rid, 503, "prefill_lost", "prefill was lost")]
            case 3:
                return [Tokens(submit.rid, (104,)), finished(submit.rid, 1)]
            case _:
                return complete(submit, index)

    async with answering(tokenizer, answer) as server:
        url = f"http://127.0.0.1:{server.port}"
        result = await measure(BenchOptions(url=url, requests=6, concurrency=1, warmup=1, output_len=3), QUIET)
    summary = result.summary
    assert (summary.ok, summary.failed) == (3, 3)
    assert summary.failures == {"503 unavailable": 1, "error event: prefill_lost": 1, "wrong length": 1}
    assert summary.output_tokens == 9, "tokens of failed requests do not count as throughput"
    out = Console(file=io.StringIO(), width=160)
    for part in report(result):
        out.print(part)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "1 failed: 503 unavailable: no prefill server" in text
    assert "1 failed: wrong length: 1 tokens came, 3 were asked for" in text


def test_large_figures_fit_a_narrow_terminal() -> None:
    timeline = dict.fromkeys(STAGES, 123.4567)
    record = RequestRecord(0.0, 900.0, [(123.4567, 1), (899.4567, 2)], 10, timeline=timeline)
    options = BenchOptions()
    result = BenchResult(options, "", datetime.now(UTC), {}, {}, [record], summarize([record], 900.0), 0.0, False)
    out = Console(file=io.StringIO(), width=80)
    for part in report(result):
        out.print(part)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for figure in ("123457", "776000", "900000"):
        assert figure in text


@asynccontextmanager
async def raw_server(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of a server that runs `handle`. The block ends when every connection has been served."""
    connections: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await handle(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client has closed
        finally:
            writer.close()
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(5):
            await asyncio.gather(*connections)


async def test_connections_are_reused_and_broken_ones_reported() -> None:
    """A server that serves two requests on a connection, then cuts off the third response."""
    connections = 0
    event = b'data: {"text":"h","meta_info":{"completion_tokens":1,"finish_reason":{"type":"length"}}}\n\n'
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(event), event)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for answer in (ok, ok, ok[:-20]):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Authorization: Bearer key\r\n" in head
            assert await reader.readexactly(2) == b"{}"
            writer.write(answer)

    async with raw_server(serve) as url:
        client = BenchClient(url, api_key="key", timeout_s=5)
        failures = [(await client.generate(b"{}", 0.0)).failure for _ in range(5)]
        client.close()
    assert failures == [None, None, "connection: ConnectionResetError", None, None]
    assert connections == 2
    unreachable = BenchClient("http://127.0.0.1:1", api_key=None, timeout_s=5)
    assert (await unreachable.generate(b"{}", 0.0)).failure == "connection: ConnectionRefusedError"


async def test_record_has_the_time_of_every_arrival() -> None:
    """Three events 50 ms apart; the last arrives in two pieces and has two tokens."""
    template = b'data: {"meta_info":{%b"completion_tokens":%d}}\n\n'
    finish = b'"finish_reason":{"type":"stop"},'
    first, second, last = (template % values for values in ((b"", 1), (b"", 2), (finish, 4)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (first, second, last[:20], last[20:] + b"data: [DONE]\n\n", b""):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            for _ in range(5):  # the client reads it before the 50 ms begin
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)

    async with raw_server(serve) as url:
        client = BenchClient(url, api_key=None, timeout_s=5)
        record = await client.generate(b"{}", 0.0)
        client.close()
    assert record.failure is None
    assert [tokens for _, tokens in record.arrivals] == [1, 2, 4]
    assert record.itl_s[0] >= 0.045
    assert record.itl_s[1] == record.itl_s[2] >= 0.045, (
        "the split event arrives when it is complete: 100 ms for two tokens"
    )
    assert record.e2e_s < record.arrivals[-1][0] + 0.04, "the latency ends with the event of the last token"


async def test_silent_server_is_reported_as_a_timeout(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer) as server:
        client = BenchClient(f"http://127.0.0.1:{server.port}", api_key=None, timeout_s=0.2)
        record = await client.generate(b'{"input_ids": [1], "stream": true}', 0.0)
        assert record.failure == "timeout"
        submit = await server.leader.expect(Submit)
        assert (await server.leader.expect(Cancel)).rid == submit.rid, "the connection was closed"


# the command


def bench_command(*arguments: str) -> closing[ForkedCommand]:
    return closing(ForkedCommand("bench", *arguments, environment={"COLUMNS": "120"}))


async def finish(command: ForkedCommand) -> tuple[int, str, str]:
    return await asyncio.to_thread(command.finish)


async def test_the_command_exits_with_1_when_a_request_failed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def answer(submit: Submit, index: int) -> list[Tokens | Finished | Failed]:
        return [Failed(submit.rid, 429, "overloaded", "queue full")] if index == 2 else complete(submit, index)

    output = tmp_path / "result.json"
    async with answering(tokenizer, answer) as server:
        flags = ("--requests=4", "--warmup=1", "--concurrency=2", "--input-len=8", "--output-len=2")
        with bench_command(f"--url=http://127.0.0.1:{server.port}", *flags, f"--output={output}") as command:
            code, out, err = await finish(command)
    assert (code, err) == (1, "")
    assert "429 overloaded: queue full" in out
    document = json.loads(output.read_text())
    assert document["command"].startswith("pdserve bench --url=http://127.0.0.1:")
    assert (document["summary"]["ok"], document["summary"]["failed"]) == (3, 1)


async def test_ctrl_c_prints_a_partial_result(tokenizer: Tokenizer) -> None:
    stuck = asyncio.Event()

    def answer(submit: Submit, index: int) -> list[Tokens | Finished | Failed]:
        if index < 3:
            return complete(submit, index)
        stuck.set()
        return [Tokens(submit.rid, (104,))]

    async with answering(tokenizer, answer) as server:
        flags = ("--requests=9", "--warmup=0", "--concurrency=1", "--input-len=8", "--output-len=2")
        with bench_command(f"--url=http://127.0.0.1:{server.port}", *flags) as command:
            await asyncio.wait_for(stuck.wait(), 60)
            command.process.send_signal(signal.SIGINT)
            code, out, err = await finish(command)
    assert (code, err) == (130, "")
    assert "requests ok" in out
    assert "6 of 9 requests have no result" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url=localhost:8200"], "--url must be http://HOST:PORT, got 'localhost:8200'"),
        (["--url=http://127.0.0.1:1"], "http://127.0.0.1:1: no response from a pdserve server there"),
        (["--concurrency=2", "--rate=3"], "not allowed with argument"),
        (["--requests=0"], "--requests must be at least 1, got '0'"),
        (["--dataset=sharegpt"], "--dataset sharegpt needs --dataset-path FILE"),
        (["--plot=x.gif"], "--plot x.gif: must end in .png, .svg, .pdf"),
        (["--output=absent/x.json"], "--output absent/x.json: no such directory: absent"),
        (["--conccurrency=3"], "unknown argument --conccurrency: did you mean --concurrency?"),
    ],
)
async def test_mistake_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    with bench_command(*arguments) as command:
        code, out, err = await finish(command)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("pdserve: error: ")
    assert message in line


def test_plot_without_matplotlib_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(StartupError, match=r"^--plot needs matplotlib: pip install matplotlib$"):
        check_plot(Path("x.png"))
