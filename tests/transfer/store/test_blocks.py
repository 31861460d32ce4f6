"""Cells of KV store blocks: their keys, and which cells a reader looks for."""

from pdserve.models.config.sharding import Shard
from pdserve.transfer.protocol.layout import KvLayout, Plane
from pdserve.transfer.store.blocks import BLOCK_TOKENS, Cell, CellKind, PoolShard, read_plans


def shard(layers: range, heads: range, *, num_layers: int = 6, **changes: int) -> PoolShard:
    planes = (Plane("k", 8), Plane("v", 8))
    page_size = changes.get("page_size", 16)
    layout = KvLayout(planes, layers.start, layers.stop, heads.start, heads.stop, page_size, 10, "float32")
    return PoolShard(layout, lambda stages: stage_layers(num_layers, stages))


def stage_layers(num_layers: int, stages: int) -> list[range]:
    if stages > num_layers:
        return []
    return [Shard(stage=stage, stages=stages).layers(num_layers) for stage in range(stages)]


def test_key_does_not_depend_on_page_size_or_tensor_parallelism() -> None:
    whole, second = shard(range(6), range(4)), shard(range(6), range(2, 4), page_size=64)
    assert [cell.key(b"\1") for cell in second.cells] == [cell.key(b"\1") for cell in whole.cells[2:]]


def test_key_depends_on_block_planes_dtype_layers_and_head() -> None:
    kind = CellKind((Plane("k", 8), Plane("v", 8)), "float32")
    keys = {
        Cell(kind, range(6), 0).key(b"\1"),
        Cell(kind, range(6), 0).key(b"\2"),
        Cell(kind, range(6), 1).key(b"\1"),
        Cell(kind, range(3), 0).key(b"\1"),
        Cell(CellKind((Plane("k", 8), Plane("v", 8)), "bfloat16"), range(6), 0).key(b"\1"),
        Cell(CellKind((Plane("k", 16), Plane("v", 16)), "float32"), range(6), 0).key(b"\1"),
        Cell(CellKind((Plane("latent", 16),), "float32"), range(6), 0).key(b"\1"),
    }
    assert len(keys) == 7


def test_cell_has_all_planes_and_layers_of_a_block() -> None:
    assert shard(range(2, 5), range(1)).cells[0].size_bytes == 3 * BLOCK_TOKENS * 16


def test_reader_looks_for_its_own_layers_first_and_then_for_other_numbers_of_stages() -> None:
    own, *others = read_plans([shard(range(2, 4), range(1))])  # the second of three stages
    assert [cell.layers for _, cell in own] == [range(2, 4)]
    assert [[cell.layers for _, cell in plan] for plan in others] == [[range(6)], [range(3), range(3, 6)]]
    for plan in others:
        covered = {layer for _, cell in plan for layer in cell.layers}
        assert covered >= {2, 3}


def test_each_read_plan_has_cells_of_every_pool() -> None:
    indexer = PoolShard(shard(range(2), range(1)).layout, lambda stages: stage_layers(2, stages))
    for plan in read_plans([shard(range(6), range(1)), indexer]):
        assert {index for index, _ in plan} == {0, 1}
