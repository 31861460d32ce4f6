"""The most likely tokens: exact, and in the same order on every device."""

import pytest
import torch

from pdserve.kernels.sampling.top_tokens import top_tokens


def expected(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]


@pytest.mark.parametrize("count", [1, 5, 20, 63, 64])
@pytest.mark.parametrize("levels", [2, 9, 1000])
def test_tokens_are_ordered_by_logit_and_then_by_id(count: int, levels: int) -> None:
    """With few levels, nearly every row has ties at its border; with many, some have."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(-levels, levels, (40, 64), generator=generator).float() / 4
    logits[3, :7] = -0.0
    logits[4, ::3] = float("-inf")
    ids, values = top_tokens(logits, count)
    assert ids.tolist() == [expected(row, count) for row in logits.tolist()]
    assert values.equal(logits.gather(1, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [20, 1024])
def test_gpu_selects_what_the_cpu_selects(count: int) -> None:
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    on_cpu, on_gpu = top_tokens(logits, count), top_tokens(logits.cuda(), count)
    assert on_gpu[0].cpu().equal(on_cpu[0])
    assert on_gpu[1].cpu().equal(on_cpu[1])
