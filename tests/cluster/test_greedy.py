"""GreedyTokens, with which tests of servers compare outputs."""

from pathlib import Path

from tests.checkpoints import GreedyTokens, load_reference, reference_greedy


def test_greedy_tokens_equal_only_the_tokens_that_transformers_generates(llama: Path) -> None:
    reference, prompt = load_reference(llama), list(range(20))
    generated = reference_greedy(reference, prompt, 6)
    assert generated == GreedyTokens(reference, prompt, 6)
    for step in range(6):
        wrong = [*generated[:step], (generated[step] + 1) % 256, *generated[step + 1 :]]
        assert wrong != GreedyTokens(reference, prompt, 6)
    assert generated[:5] != GreedyTokens(reference, prompt, 6)
    for count in range(6):
        assert generated[:count] == GreedyTokens(reference, prompt, 6)[:count]
    assert list(GreedyTokens(reference, prompt, 6)) == generated
    assert GreedyTokens(reference, prompt, 6)[2:] == generated[2:]
