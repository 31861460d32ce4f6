"""Checksums of equal tokens are equal for any paging and sharding, and detect any changed byte."""

import pytest
import torch
import xxhash

from pdserve.memory.kv_pool import KvPool
from pdserve.transfer.protocol.checksum import add_sums, block_sum
from pdserve.transfer.protocol.layout import KvLayout, Plane
from tests.transfer.data.kv_cells import planes_of

LAYERS, HEADS, TOKENS, DIM = 4, 6, 16, 4


def layout(layers: tuple[int, int] = (0, LAYERS), heads: tuple[int, int] = (0, HEADS)) -> KvLayout:
    return KvLayout((Plane("k", 2 * DIM), Plane("v", 2 * DIM)), *layers, *heads, 4, 8, "bfloat16")


@pytest.fixture
def tokens() -> torch.Tensor:
    """KV of all layers and heads: `[layer, plane, head, token, dim]`."""
    return torch.randn(LAYERS, 2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(5)).bfloat16()


def test_checksum_is_the_sum_of_seeded_hashes_of_each_layer_plane_and_head(tokens: torch.Tensor) -> None:
    expected = 0
    for layer in range(LAYERS):
        for plane, name in enumerate("kv"):
            for head in range(HEADS):
                data = tokens[layer, plane, head].contiguous().view(torch.uint8).numpy().tobytes()
                seed = xxhash.xxh3_64_intdigest(f"{name}/{layer}/{head}".encode())
                expected += xxhash.xxh3_64_intdigest(data, seed=seed)
    assert block_sum(planes_of(tokens), layout()) == expected % 2**64


@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (1, 3), (4, 2)])
def test_checksums_of_all_ranks_add_up_to_the_checksum_of_the_whole(
    tokens: torch.Tensor, stages: int, shards: int
) -> None:
    deep, wide = LAYERS // stages, HEADS // shards
    sums = []
    for stage in range(0, LAYERS, deep):
        for shard in range(0, HEADS, wide):
            held = tokens[stage : stage + deep, :, shard : shard + wide]
            sums.append(block_sum(planes_of(held), layout((stage, stage + deep), (shard, shard + wide))))
    assert add_sums(sums) == block_sum(planes_of(tokens), layout())


def test_checksum_of_a_region_covers_its_layers_and_heads(tokens: torch.Tensor) -> None:
    held = tokens[1:3, :, 2:5]
    part = block_sum(planes_of(held), layout((1, 3), (2, 5)), range(2, 3), range(3, 5))
    assert part == block_sum(planes_of(tokens[2:3, :, 3:5]), layout((2, 3), (3, 5)))


def test_checksum_is_independent_of_the_page_size_and_detects_one_bit(tokens: torch.Tensor) -> None:
    pools = {}
    for page_size, pages in ((4, [6, 1, 3, 2]), (8, [5, 0])):
        pool = KvPool(
            num_pages=8,
            num_layers=LAYERS,
            num_heads=HEADS,
            page_size=page_size,
            head_dim=DIM,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        for token in range(TOKENS):
            pool.data[pages[token // page_size], :, :, :, token % page_size] = tokens[:, :, :, token]
        pools[page_size] = pool
    expected = block_sum(planes_of(tokens[:, :, :, 3:14]), layout())
    assert block_sum(pools[4].read_tokens([6, 1, 3, 2], 3, 14), layout()) == expected
    assert block_sum(pools[8].read_tokens([5, 0], 3, 14), layout()) == expected
    pools[8].data.view(torch.int16)[5, 1, 1, 0, 7, 3] ^= 1
    assert block_sum(pools[8].read_tokens([5, 0], 3, 14), layout()) != expected


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_checksum_detects_swapped_blocks(tokens: torch.Tensor, dim: int) -> None:
    order = list(range(tokens.shape[dim]))
    order[0], order[1] = order[1], order[0]
    assert block_sum(planes_of(tokens.index_select(dim, torch.tensor(order))), layout()) != block_sum(
        planes_of(tokens), layout()
    )


def test_checksum_of_no_tokens_is_defined(tokens: torch.Tensor) -> None:
    nothing = planes_of(tokens[:, :, :, :0])
    parts = (block_sum(nothing, layout(), range(2)), block_sum(nothing, layout(), range(2, LAYERS)))
    assert add_sums(parts) == block_sum(nothing, layout())


def test_data_in_another_shape_is_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8 of the host"):
        block_sum([plane[:, :, 3:] for plane in planes_of(tokens)], layout())
    with pytest.raises(ValueError, match="needs 2 planes, got 1"):
        block_sum(planes_of(tokens)[:1], layout())
    with pytest.raises(ValueError, match=r"\[4, 3\], got shape \[4, 6, 16, 8\]"):
        block_sum(planes_of(tokens), layout(heads=(0, 3)))
