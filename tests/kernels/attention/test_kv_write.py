"""kv_write_reference is a copy: bitwise, and nothing else in the pool changes."""

import pytest
import torch

from pdserve.kernels.attention.kv_write import kv_write_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_exactly_the_named_slots(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(6, 3, 2, 2, 4, 8, generator=generator).to(dtype)
    expected = pool.clone()
    key, value = torch.randn(2, 5, 2, 8, generator=generator).to(dtype)
    page_ids, offsets = torch.tensor([5, 0, 5, 2, 3]), torch.tensor([1, 0, 2, 3, 1])
    for token, (page, offset) in enumerate(zip(page_ids.tolist(), offsets.tolist(), strict=True)):
        expected[page, 1, 0, :, offset] = key[token]
        expected[page, 1, 1, :, offset] = value[token]
    kv_write_reference(pool[:, 1, 0], pool[:, 1, 1], key, value, page_ids, offsets)
    assert pool.equal(expected)
