"""The figures of benchmarks/load.py."""

from benchmarks.load import LONG_TOKENS, Answer, figures_of


def answer(prompt_tokens: int, ttft_s: float, tokens: int = 3, failure: str = "") -> Answer:
    """It starts at 10 s, and has a token every 15 ms after the first."""
    arrivals = [10 + ttft_s + 0.015 * number for number in range(tokens)]
    return Answer(prompt_tokens, 3, 10.0, arrivals, tokens, arrivals[-1], failure)


def test_short_and_long_prompts_and_failures_have_their_own_figures() -> None:
    answers = [answer(499, 0.1), answer(500, 0.6), answer(LONG_TOKENS, 4.97, tokens=3), answer(16, 9.0, failure="503")]
    found = {
        (figure.figure.removeprefix("long: "), figure.unit): figure.value for figure in figures_of("long", answers)
    }
    assert found["first token of prompts below 500 tokens p99", "ms"] == 100
    assert found["first token p99", "ms"] == 600
    assert found["first token of 32000 tokens", "ms"] == 4970
    assert found["gap p50", "ms"] == 15
    assert found["answers that failed", ""] == 1
    assert found["within 500 ms and 20 ms a token", "%"] == 25
    assert found["throughput in tokens", "tokens/s"] == 0.9967, "nine tokens until the last answer has ended"
