"""`pdserve plan` for a load: flags, traces, fits of step times, and the ratio of servers that it recommends."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import StartupError
from pdserve.scheduler.simulation.step_times import StepTimes
from pdserve.server.bench.client import RequestRecord
from pdserve.server.cli import main
from pdserve.server.plan.ratio.calibration import mean_step_s, running_together
from pdserve.server.plan.ratio.fit import fit_nonnegative
from pdserve.server.plan.ratio.interference import times_together
from pdserve.server.plan.ratio.load import BLOCK_TOKENS, read_trace
from pdserve.server.plan.ratio.options import Ratio, parse_ratios
from pdserve.server.plan.ratio.pair import MeasuredPair, Server, read_pair, write_pair

DECODE = {"page_size": 16, "max_running_requests": 32, "max_step_tokens": 256, "local_prefill": "never"}
PAIR = MeasuredPair(
    model="small",
    device="cpu",
    context_length=4096,
    vocab_size=1000,
    prefill=Server(2048, 65536, {"page_size": 16, "chunk_size": 512}),
    decode=Server(2048, 65536, DECODE),
    times=StepTimes(
        prefill_step_s=0.01,
        prefill_token_s=0.002,
        decode_steps=((1, 0.02), (4, 0.03), (16, 0.08)),
    ),
)
BOUNDS = ("--slo-ttft", "1500", "--slo-itl", "45")


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    write_pair(tmp_path / "rates.json", PAIR)
    return tmp_path / "rates.json"


def plan(capsys: pytest.CaptureFixture[str], rates: Path, *flags: str) -> dict[str, Any]:
    assert main(["plan", "--json", "--rates", str(rates), *BOUNDS, *flags]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    ("load", "best", "limit"),
    [
        (("--input-len", "400", "--output-len", "16", "--rate", "2"), "2P:1D", "prefill"),
        (("--input-len", "32", "--output-len", "200", "--rate", "2.5"), "1P:2D", "decode"),
        (("--input-len", "64", "--output-len", "32", "--rate", "0.5"), "1P:1D", "none"),
    ],
    ids=["long prompts", "long outputs", "light load"],
)
def test_plan_names_the_best_ratio_and_the_limit(
    capsys: pytest.CaptureFixture[str], rates: Path, load: tuple[str, ...], best: str, limit: str
) -> None:
    found = plan(capsys, rates, *load, "--requests", "50")
    assert found["best"] == best
    assert {row["ratio"]: row["limit"] for row in found["ratios"]}["1P:1D"] == limit
    good = {row["ratio"]: row["goodput"]["good"] for row in found["ratios"]}
    assert good[best] >= 0.97 * max(good.values())


def test_plan_prints_a_table(capsys: pytest.CaptureFixture[str], rates: Path) -> None:
    flags = ("--input-len", "64", "--rate", "1", "--requests", "10", "--ratios", "1:1,3:2")
    assert main(["plan", "--rates", str(rates), *flags, *BOUNDS]) == 0
    text = capsys.readouterr().out
    assert "10 requests, 1 a second (Poisson): 64 tokens in, 128 out" in text
    assert "3P:2D" in text
    assert "best: 1P:1D" in text


def test_servers_on_one_machine_share_its_cores(capsys: pytest.CaptureFixture[str], rates: Path) -> None:
    load = ("--input-len", "400", "--output-len", "16", "--rate", "2", "--requests", "40", "--ratios", "2:1")
    alone, shared = plan(capsys, rates, *load), plan(capsys, rates, *load, "--cores", "1")
    goodput = [found["ratios"][0]["goodput"]["requests_per_s"] for found in (alone, shared)]
    assert goodput[1] < 0.7 * goodput[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input-len", "8", "--rate", "1"), "goodput needs --slo-ttft-ms or --slo-itl-ms"),
        (("--input-len", "8", *BOUNDS), "--input-len needs --rate"),
        (("--input-len", "8", "--trace", "x", *BOUNDS), "give one of them"),
        (("--trace", "x", "--url", "http://a:1", *BOUNDS), "a pair has both"),
        (("--trace", "x", "--url", "http://a:1", "--prefill-url", "b:2", *BOUNDS), "--prefill-url must be http://HOST"),
        (("--trace", "x", "--rates", "y", "--save-rates", "z", *BOUNDS), "--rates reads step times"),
        (("--trace", "x", "--rates", "missing.json", *BOUNDS), "--rates missing.json: "),
        (
            ("--trace", "x", "--rates", "r.json", "--max-running-requests", "8", *BOUNDS),
            "--max-running-requests would have no effect: --rates has the step times of a pair",
        ),
        (("--trace", "x", "--ratios", "1:0", *BOUNDS), "--ratios '1:0': give prefill:decode servers"),
        (("--trace", "missing.jsonl", *BOUNDS), "--trace missing.jsonl: "),
        (("--input-len", "8", "--rate", "1", "--save-rates", "missing/x", *BOUNDS), "no such directory: missing"),
    ],
)
def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["plan", *flags]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "starting a prefill" not in stderr, "mistakes are found before servers are measured"


def test_ratios_are_parsed() -> None:
    assert parse_ratios("1:1, 2P:1D,2:1") == (Ratio(1, 1), Ratio(2, 1))


def test_rates_are_equal_after_writing_and_reading(rates: Path) -> None:
    assert read_pair(rates) == PAIR


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": {"prefill_token_s": 1, "decode_steps": []}}, "decode_steps must have ascending numbers"),
        ({"times": {"prefill_token_s": 1, "decode_steps": [[4, 1], [2, 1]]}}, "got [4, 2]"),
        (
            {
                "times": {
                    "prefill_token_s": 1,
                    "decode_steps": [[1, 1]],
                    "interference": [{"prefills": 1, "decodes": 1, "decode": 0}],
                }
            },
            "times.interference[0].decode",
        ),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_wrong_rates_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(PAIR), **change}))
    with pytest.raises(StartupError) as refused:
        read_pair(path)
    assert message in str(refused.value)


def test_settings_that_a_server_refuses_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(PAIR, decode=Server(10, 10, {**DECODE, "growth_tokens": -1}))
    write_pair(tmp_path / "rates.json", wrong)
    flags = ["--rates", str(tmp_path / "rates.json"), "--input-len", "8", "--rate", "1", *BOUNDS]
    assert main(["plan", *flags]) == 2
    assert "growth_tokens" in capsys.readouterr().err


def test_bounds_are_the_settings_of_the_simulated_servers() -> None:
    found = PAIR.server_settings({"slo_ttft_ms": 1500.0, "slo_itl_ms": 45.0})
    assert (found.decode.slo_ttft_s, found.decode.slo_itl_s, found.prefill.slo_ttft_s) == (1.5, 0.045, 1.5)
    own = PAIR.server_settings({})
    assert (own.decode.slo_ttft_s, own.decode.slo_itl_s, own.prefill.slo_ttft_s) == (0.5, None, 0.5)


def test_mooncake_trace_shares_prefixes_by_block(
    capsys: pytest.CaptureFixture[str], rates: Path, tmp_path: Path
) -> None:
    blocks = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    lines = [
        json.dumps({"timestamp": 4000 * number, "input_length": 1200, "output_length": 8, "hash_ids": ids})
        for number, ids in enumerate(blocks)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines) + "\n")
    load = read_trace(trace, most=10, speed=2.0, max_total_tokens=4096)
    assert load.shares_prefixes
    assert [arrival.at_s for arrival in load.arrivals] == [0.0, 2.0, 4.0]
    first, second = (arrival.prompt for arrival in load.arrivals[:2])
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS] != second[2 * BLOCK_TOKENS]
    found = plan(capsys, rates, "--trace", str(trace), "--ratios", "1:1,2:1")
    # later prompts reuse the pages of the two shared blocks from the prefix cache of decode
    assert all(row["summary"]["ok"] == 3 for row in found["ratios"])
    assert found["ratios"][0]["summary"]["ttft_s"]["p50"] < 0.5 * found["ratios"][0]["summary"]["ttft_s"]["max"]


def test_azure_trace_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.4799600,396,109\n"
    )
    load = read_trace(trace, most=10, speed=1.0, max_total_tokens=4096)
    assert [(len(arrival.prompt), arrival.output_tokens) for arrival in load.arrivals] == [(374, 44), (396, 109)]
    assert load.arrivals[1].at_s == pytest.approx(1.5)
    assert not load.shares_prefixes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "output_length": 2}', "no field 'input_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2}', "lengths must be at least 1, got 0"),
        ('{"timestamp": 1, "input_length": 9000, "output_length": 2}', "request 1 has 9002 tokens"),
        ("", "no requests"),
        ("not JSON", "Expecting value"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, line: str, message: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line + "\n")
    with pytest.raises(StartupError) as refused:
        read_trace(trace, most=10, speed=1.0, max_total_tokens=4096)
    assert message in str(refused.value)


def record(started_s: float, arrivals: list[tuple[float, int]]) -> RequestRecord:
    return RequestRecord(started_s, arrivals=arrivals)


def test_mean_step_time_is_right_when_tokens_arrive_together() -> None:
    # a step takes 0.1 s; the client sees two tokens at once, then three
    late = record(1.0, [(0.0, 1), (0.2, 3), (0.5, 6)])
    regular = record(1.1, [(0.1 * step, step + 1) for step in range(5)])
    begin, end = running_together([late, regular])
    assert (begin, end) == pytest.approx((1.1, 1.5))
    assert mean_step_s([late, regular], begin, end) == pytest.approx(0.1)
    assert mean_step_s([late], 1.6, 1.7) is None


def prompt_record(started_s: float, seconds: float) -> RequestRecord:
    return RequestRecord(started_s, e2e_s=seconds, arrivals=[(seconds, 1)], timeline={"prefill": seconds / 2})


def test_times_together_are_measured_while_all_servers_compute() -> None:
    # both batches run from 1.0 to 3.0; prompts that begin earlier or end later do not count
    batches = [record(0.0, [(0.2 * step, step + 1) for step in range(5, 16)]), record(0.9, [(0.1, 1), (3.1, 16)])]
    prompts = [[prompt_record(0.5, 1.0), prompt_record(1.5, 1.0), prompt_record(2.5, 1.0)]]
    prompts.append([prompt_record(0.9, 0.2), prompt_record(1.1, 0.4), prompt_record(1.5, 1.6)])
    prompt_s, step_s = times_together(prompts, batches)
    assert prompt_s == pytest.approx((1.0 / 2 + 0.4 / 2) / 2)
    assert step_s == pytest.approx(0.2)
    assert times_together(prompts[:1], ()) == (0.5, None)
    assert times_together((), batches)[0] is None


def test_fit_finds_the_coefficients_and_drops_negative_ones() -> None:
    rows = [(1, tokens, tokens * tokens / 2) for tokens in (16, 128, 256, 512)]
    exact = fit_nonnegative(rows, [0.02 + 0.001 * tokens + 1e-6 * pairs for _, tokens, pairs in rows])
    assert exact == pytest.approx([0.02, 0.001, 1e-6])
    falling = fit_nonnegative([(1, 1), (1, 2), (1, 4)], [4.0, 3.0, 2.0])
    assert falling[0] > 0
    assert falling[1] == 0
