"""The checksum of equal tokens is equal on both sides, and any changed byte shows."""

import numpy as np
import pytest
import torch
import xxhash

from pdserve.memory.kv_pool import KvPool
from pdserve.transfer.checksum import checksum


def pool(page_size: int) -> KvPool:
    return KvPool(
        num_pages=8,
        num_layers=2,
        num_heads=2,
        page_size=page_size,
        head_dim=4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def test_it_is_xxh3_64_of_the_bytes() -> None:
    data = np.arange(1000, dtype=np.uint16)
    assert checksum(data) == xxhash.xxh3_64_intdigest(data.tobytes())
    assert checksum(torch.from_numpy(data)) == checksum(data)
    assert checksum(torch.empty(0)) == xxhash.xxh3_64_intdigest(b"")


def test_it_does_not_depend_on_the_page_size_and_sees_one_bit() -> None:
    small, large = pool(4), pool(8)
    tokens = torch.randn(2, 2, 2, 16, 4).bfloat16()  # [layer, plane, head, token, dim]
    for kv, pages in ((small, [6, 1, 3, 2]), (large, [5, 0])):
        for token in range(16):
            kv.data[pages[token // kv.page_size], :, :, :, token % kv.page_size] = tokens[:, :, :, token]
    expected = checksum(small.read_tokens([6, 1, 3, 2], 3, 14))
    assert checksum(large.read_tokens([5, 0], 3, 14)) == expected
    large.data[5, 1, 1, 0, 7, 3] += 1
    assert checksum(large.read_tokens([5, 0], 3, 14)) != expected


def test_strided_data_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        checksum(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="contiguous"):
        checksum(np.zeros((4, 4))[:, 1])
