"""The comparison with transformers that tests of servers use."""

from pathlib import Path

from tests.checkpoints import GreedyTokens, load_reference, reference_greedy


def test_tokens_equal_those_that_transformers_generates_and_no_others(llama: Path) -> None:
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
