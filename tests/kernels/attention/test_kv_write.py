"""kv_write is a copy: bitwise, and nothing else in the pool changes."""

import pytest
import torch

from pdserve.kernels.attention.kv_write import kv_write


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_exactly_the_named_slots(dtype: torch.dtype, impl: str) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(6, 3, 2, 2, 4, 8, generator=generator).to(dtype)
    expected = pool.clone()
    key, value = torch.randn(2, 5, 2, 8, generator=generator).to(dtype)
    page_ids, offsets = torch.tensor([5, 0, 5, 2, 3]), torch.tensor([1, 0, 2, 3, 1])
    for token, (page, offset) in enumerate(zip(page_ids.tolist(), offsets.tolist(), strict=True)):
        expected[page, 1, 0, :, offset] = key[token]
        expected[page, 1, 1, :, offset] = value[token]
    kv_write(pool[:, 1, 0], pool[:, 1, 1], key, value, page_ids, offsets, impl=impl)  # type: ignore[arg-type]
    assert pool.equal(expected)


def test_rows_of_wrong_shape_are_refused() -> None:
    pages = torch.zeros(2, 2, 4, 8)
    one = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="do not fit"):
        kv_write(pages, pages, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), one, one)
    with pytest.raises(ValueError, match="the pages are"):
        kv_write(pages, pages, torch.zeros(1, 2, 8).half(), torch.zeros(1, 2, 8).half(), one, one)
