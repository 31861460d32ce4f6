"""Log-probabilities of given logits, and their alternatives."""

import torch

from pdserve.common.sampling import TokenLogprob
from pdserve.models.layers.host_copies import ReadBack
from pdserve.models.sampling.logprobs import entries, score


def scored(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprob]:
    return entries(ReadBack(score(logits, torch.tensor(tokens), max(tops)).tensors)(), tops)


def test_values_equal_log_softmax() -> None:
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(1)) * 4
    tokens = list(range(0, 450, 50))
    expected = logits.double().log_softmax(dim=-1)
    for row, entry in enumerate(scored(logits, tokens, [6] * 9)):
        ranked = sorted(range(500), key=lambda token: -float(expected[row, token]))[:6]
        assert entry.token == tokens[row]
        assert entry.logprob is not None
        assert abs(entry.logprob - float(expected[row, entry.token])) < 1e-5
        assert [token for token, _ in entry.top] == ranked
        assert all(abs(logprob - float(expected[row, token])) < 1e-5 for token, logprob in entry.top)


def test_each_row_has_its_requested_alternatives() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    found = scored(logits, [0, 1, 2, 3], [0, 2, 5, 9])
    assert [len(entry.top) for entry in found] == [0, 2, 5, 5]
    assert all(entry.logprob == dict(entry.top)[entry.token] for entry in found[2:])


def test_no_alternatives_are_returned_unless_requested() -> None:
    (entry,) = scored(torch.zeros(1, 4), [2], [0])
    assert entry == TokenLogprob(2, entry.logprob, ())


def test_equally_likely_alternatives_are_ordered_by_id() -> None:
    (entry,) = scored(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]), [4], [4])
    assert [token for token, _ in entry.top] == [1, 3, 0, 2]
