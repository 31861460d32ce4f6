"""Which regions are staged, and how large their parts are."""

import itertools
from typing import get_args

import msgspec
import pytest

from pdserve.configs.setting_types import StagingSetting
from pdserve.transfer.plan.copy_regions import CopyRegion
from pdserve.transfer.plan.staged_regions import (
    MAX_PART_BYTES,
    StagedRegion,
    pair_regions,
    staged_regions,
)
from pdserve.transfer.protocol.layout import KvLayout
from pdserve.transfer.protocol.messages import (
    PROTOCOL_VERSION,
    HeadSlice,
    Hello,
    InstanceId,
    Pool,
    Rank,
    StageRing,
    TransferKey,
    Welcome,
    dp_instance,
    split_dp_instance,
)
from tests.transfer.data.kv_cells import layout

LAYERS, HEADS = 4, 4
CELL_BYTES = 2 * 8 * 4
MIB = 1 << 20
SETTINGS: tuple[StagingSetting, ...] = get_args(StagingSetting)


def shards(tp: int, pp: int = 1) -> list[KvLayout]:
    """Pipeline stages divide the layers, the ranks of a stage the heads. More ranks than heads are replicas."""
    found = []
    for stage, rank in itertools.product(range(pp), range(tp)):
        first = rank * HEADS // tp
        heads = (first, max(first + 1, (rank + 1) * HEADS // tp))
        layers = (stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
        found.append(layout(layers, heads, page_size=16, num_pages=8))
    return found


def ranks(layouts: list[KvLayout], staging: StagingSetting, ring_bytes: int | None = None) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            number,
            "session",
            (Pool(kv, 0, kv.size_bytes),),
            ring=StageRing(1 << 30, ring_bytes, 5) if ring_bytes is not None else None,
            staging=staging,
        )
        for number, kv in enumerate(layouts)
    )


def pair(
    prefill: list[KvLayout],
    decode: list[KvLayout],
    *,
    settings: tuple[StagingSetting, StagingSetting] = ("auto", "auto"),
    ring_bytes: int | None = MIB,
) -> tuple[Hello, Welcome]:
    hello = Hello(PROTOCOL_VERSION, InstanceId("decode"), "m", "m", ranks(decode, settings[1], ring_bytes))
    return hello, Welcome(PROTOCOL_VERSION, InstanceId("prefill"), "m", "m", ranks(prefill, settings[0]))


@pytest.mark.parametrize(("prefill", "decode"), [*itertools.product((1, 2, 4, 8), repeat=2)])
def test_auto_stages_if_and_only_if_heads_are_split_differently(prefill: int, decode: int) -> None:
    hello, welcome = pair(shards(prefill), shards(decode))
    found = staged_regions(hello, welcome)
    same_heads = min(prefill, HEADS) == min(decode, HEADS)  # eight ranks have one head each, as four do
    expected = () if same_heads else pair_regions(hello, welcome, ("k", "v"))
    assert tuple(one.region for one in found) == expected
    assert bool(expected) != same_heads


def test_auto_stages_nothing_if_both_sides_hold_the_same_heads() -> None:
    assert staged_regions(*pair(shards(2, pp=2), shards(2, pp=1))) == ()
    assert len(staged_regions(*pair(shards(1, pp=2), shards(2, pp=1)))) == 4


@pytest.mark.parametrize("settings", [*itertools.product(SETTINGS, repeat=2)])
def test_off_on_either_side_disables_staging_and_on_stages_all(settings: tuple[StagingSetting, StagingSetting]) -> None:
    equal, unequal = (staged_regions(*pair(shards(2), shards(decode), settings=settings)) for decode in (2, 1))
    assert len(unequal) == (0 if "off" in settings else 2)
    assert len(equal) == (2 if "on" in settings and "off" not in settings else 0)


def test_latent_rows_are_never_staged() -> None:
    rows = [layout((0, LAYERS), (0, 1), page_size=16, num_pages=8, planes=("latent",))]
    assert staged_regions(*pair(rows * 2, rows, settings=("on", "on"))) == ()


@pytest.mark.parametrize("prefill", [2, 4, 8])
def test_data_parallel_ranks_of_a_decode_server_have_different_writers(prefill: int) -> None:
    """Each data-parallel rank pairs as a decode server with one rank; each prefill rank has all rows."""
    rows = [layout((0, LAYERS), (0, 1), page_size=16, num_pages=8, planes=("latent",))]
    hello, welcome = pair(rows * prefill, rows)
    server = InstanceId("0123-dp-4567")
    assert split_dp_instance(server) == (server, 0)
    sources = []
    for dp_rank in range(prefill):
        instance = dp_instance(server, dp_rank)
        assert split_dp_instance(instance) == (server, dp_rank)
        (region,) = pair_regions(msgspec.structs.replace(hello, instance=instance), welcome, ("latent",))
        assert (region.destination, region.layers) == (0, range(LAYERS))
        sources.append(region.source)
    assert sorted(sources) == list(range(prefill))


def test_nothing_is_staged_to_a_decode_server_without_rings() -> None:
    assert staged_regions(*pair(shards(2), shards(1), ring_bytes=None)) == ()


def test_part_size_depends_on_the_ring_and_its_writers() -> None:
    token_bytes = LAYERS * CELL_BYTES  # of one head
    for ring_bytes, part_bytes in ((MIB, MIB // 8), (1 << 30, MAX_PART_BYTES), (4 * token_bytes, token_bytes)):
        found = staged_regions(*pair(shards(4), shards(1), ring_bytes=ring_bytes))
        assert {one.token_bytes for one in found} == {token_bytes}
        assert {one.part_bytes for one in found} == {part_bytes}
    assert {one.block for one in found} == {HeadSlice(0, LAYERS, head, head + 1) for head in range(4)}
    assert staged_regions(*pair(shards(4), shards(1), ring_bytes=token_bytes - 1)) == ()


@pytest.mark.parametrize(("start", "end", "limit"), [(0, 10, 4), (3, 4, 1), (5, 5, 1), (0, 9, 3), (7, 1007, 64)])
def test_parts_cover_the_tokens_within_the_limit(start: int, end: int, limit: int) -> None:
    region = CopyRegion(3, 2, range(4), range(1, 2))
    staged = StagedRegion(region, StageRing(0, 1 << 30, epoch=5), token_bytes=100, part_bytes=100 * limit + 99)
    parts = staged.parts(TransferKey(1, 1), start, end)
    assert [token for part in parts for token in range(part.token_start, part.token_end)] == list(range(start, end))
    assert len(parts) == -(-(end - start) // limit)
    assert all(0 < part.tokens <= limit for part in parts)
    assert {(part.epoch, part.writer, part.destination, part.block) for part in parts} <= {(5, 3, 2, staged.block)}
