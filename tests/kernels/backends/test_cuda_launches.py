"""Launchers pass the arguments that their kernels in csrc/ declare, and constants that compile; see cuda_sources.py."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pdserve.kernels.attention import paged_prefill_cuda, rope_decode_cuda
from pdserve.kernels.attention.attention_plan import make_work_plan
from pdserve.kernels.backends import few_rows_cuda, float_at_once_cuda, fp8_at_once_cuda, gemv_cuda
from pdserve.kernels.backends.nvrtc import SOURCE_FOLDER
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.dsa import sparse_mla_cuda
from pdserve.kernels.hisparse import write_back
from pdserve.kernels.hisparse.slot_tables import HotRows, KvRows, SlotTables
from pdserve.kernels.hisparse.swap_in import copy_misses, swap_in
from pdserve.kernels.hisparse.swap_plan import SwapPlan
from pdserve.kernels.linear.fp8_format import Fp8Matrix, Weight
from pdserve.kernels.linear.fp8_linear import fp8_gated_linear, fp8_linear
from pdserve.kernels.linear.linear import gated_linear, linear
from pdserve.kernels.moe import expert_tiles_cuda
from pdserve.kernels.moe.experts import grouped_experts
from pdserve.kernels.moe.router import norm_route_cuda
from pdserve.kernels.moe.router.routing import route_reference, select_and_route
from pdserve.kernels.moe.router.selection import SelectionRule
from pdserve.kernels.nvfp4.nvfp4 import Nvfp4Matrix, nvfp4_linear
from pdserve.kernels.packed4.group_format import GroupScaled
from pdserve.kernels.packed4.int4_linear_cuda import launch_int4_linear_cuda
from pdserve.kernels.sampling.keep_top_p import keep_top_p
from tests.kernels import cuda_sources
from tests.kernels.interpreter import INTERPRETED
from tests.models.pretend_gpu import DEVICE, PretendGpu

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")

BATCH, TOP_K, HOT_ROWS, PAGE_SIZE, PAGES, LAYERS = 3, 8, 16, 4, 6, 2


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with cuda_sources.compiling():
        yield


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("row_bytes", [32, 40, 2064])
def test_hot_buffer_launches_match_their_kernels(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows of 16n bytes that are not large are fetched early, which is an argument of swap_in."""
    sizes = {"groups": 1, "requests": BATCH, "hot_rows": HOT_ROWS, "max_context": 64, "page_size": PAGE_SIZE}
    launched = recorded(monkeypatch)
    with PretendGpu() as gpu:
        use_own_stream(DEVICE)
        host = gpu.pin(torch.zeros(PAGES, LAYERS, PAGE_SIZE, row_bytes, dtype=torch.uint8))
        hot = torch.zeros(PAGES, LAYERS, PAGE_SIZE, row_bytes, dtype=torch.uint8, device=DEVICE)
        tables, plan = SlotTables.allocate(**sizes, device=DEVICE).group(0), SwapPlan.allocate(BATCH, TOP_K, DEVICE)
        step = integers(BATCH, TOP_K), integers(BATCH), integers(BATCH), tables, integers(BATCH, PAGES)
        swap_in(plan, *step, host[:, 0], hot[:, 0])
        copy_misses(plan, host[:, 0], hot[:, 0])
        write_back.write_back(hot, HotRows(integers(LAYERS, BATCH)), host, KvRows(integers(BATCH)))
    assert launched == ["swap_in", "copy_misses", "write_back"]


def test_sparse_attention_launches_match_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.kernels.dsa.index_topk_triton import launch_select_top

    launched = recorded(monkeypatch)
    monkeypatch.setattr(sparse_mla_cuda, "load_kernel", cuda_sources.load_kernel)
    with PretendGpu():
        use_own_stream(DEVICE)
        query = torch.zeros(BATCH, 64, 576, dtype=torch.bfloat16, device=DEVICE)
        rows, out = torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.bfloat16, device=DEVICE), query[..., :512].clone()
        sparse_mla_cuda.launch_sparse_mla_cuda(query, rows, integers(BATCH, TOP_K), out, scale=0.1)
        packed = torch.zeros(PAGES, PAGE_SIZE, 656, dtype=torch.uint8, device=DEVICE)
        few = query[:, :16]
        sparse_mla_cuda.launch_packed_mla_cuda(few, packed, integers(BATCH, TOP_K), out[:, :16].clone(), scale=0.1)
        launch_select_top(torch.zeros(BATCH, 128, device=DEVICE), integers(BATCH), integers(BATCH, TOP_K))
    assert launched == ["sparse_mla", "packed_mla", "select_top"]


def test_prefill_attention_launch_matches_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    monkeypatch.setattr(paged_prefill_cuda, "load_kernel", cuda_sources.load_kernel)
    with PretendGpu():
        use_own_stream(DEVICE)
        lengths, pages = [150, 3], [[0, 1, 2], [3]]
        plan = make_work_plan(lengths, lengths, pages, page_size=64, num_kv_heads=1, num_heads=4, device=DEVICE)
        query = torch.zeros(sum(lengths), 4, 128, dtype=torch.bfloat16, device=DEVICE)
        keys, values = torch.zeros(2, plan.copied_tokens, 128, dtype=torch.bfloat16, device=DEVICE).unbind()
        partial = torch.zeros(1, 4, 128, 128, device=DEVICE)
        paged_prefill_cuda.launch_tiles(
            query, keys, values, plan, plan.tiles, partial, partial[..., 0], torch.empty_like(query), scale=0.1
        )
    assert launched == ["prefill_attention"]


@pytest.mark.parametrize("normed", [False, True])
def test_rope_decode_launch_matches_its_kernel(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    monkeypatch.setattr(rope_decode_cuda, "load_kernel", cuda_sources.load_kernel)
    with PretendGpu():
        use_own_stream(DEVICE)
        plan = make_work_plan([1], [70], [[0, 1]], page_size=64, num_kv_heads=2, num_heads=8, device=DEVICE)
        qkv, angle = (torch.zeros(1, size, dtype=torch.bfloat16, device=DEVICE) for size in (12 * 128, 128))
        pages, out = torch.zeros(2, 2, 64, 128, dtype=torch.bfloat16, device=DEVICE), qkv[:, :1024].view(1, 8, 128)
        norm = angle[0] if normed else None
        rope_decode_cuda.launch_rope_decode(
            qkv, angle, angle, pages, pages, plan, out, scale=0.1, q_norm=norm, k_norm=norm, eps=1e-6, sinks=None
        )
    assert launched == ["rope_decode"]


@pytest.mark.parametrize("rows", [1, 9, 32, 100])
@pytest.mark.parametrize(("outputs", "group"), [(64, 32), (4096, 128), (24_576, 128)])
def test_int4_launches_match_their_kernel(rows: int, outputs: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of rows and tiles, the ring buffers fit into shared memory."""
    launched = recorded(monkeypatch)
    hopper(monkeypatch)
    with PretendGpu():
        use_own_stream(DEVICE)
        weight = GroupScaled.allocate(outputs, 2 * group, group=group, dtype=torch.bfloat16, device=DEVICE)
        x, out = (torch.zeros(rows, size, dtype=torch.bfloat16, device=DEVICE) for size in (2 * group, outputs // 2))
        bias = torch.zeros(outputs, dtype=torch.bfloat16, device=DEVICE)
        launch_int4_linear_cuda(x, weight, bias, out, gated=True)
    assert launched == ["int4_linear"]


@pytest.mark.parametrize(
    ("rows", "dtype", "outputs", "columns"),
    [
        (1, torch.bfloat16, 24_576, 256),
        (4, torch.float16, 4096, 208),
        (9, torch.float16, 64, 384),
        (32, torch.bfloat16, 4096, 208),
    ],
)
def test_nvfp4_launch_matches_its_kernel(
    rows: int, dtype: torch.dtype, outputs: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = recorded(monkeypatch)
    hopper(monkeypatch)
    with PretendGpu():
        use_own_stream(DEVICE)
        weight = Nvfp4Matrix.allocate(outputs, columns, device=DEVICE)
        x, bias = (torch.zeros(*shape, dtype=dtype, device=DEVICE) for shape in ((rows, columns), (outputs,)))
        nvfp4_linear(x, weight, bias, gated=True)
    assert launched == ["nvfp4_linear"]


@pytest.mark.parametrize("by_row", [False, True])
def test_fp8_launch_matches_its_kernel(by_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    hopper(monkeypatch)
    with PretendGpu():
        use_own_stream(DEVICE)
        allocate = Fp8Matrix.allocate_by_row if by_row else Fp8Matrix.allocate
        x = torch.zeros(3, 256, dtype=torch.bfloat16, device=DEVICE)
        fp8_linear(x, allocate(96, 256, device=DEVICE))
        fp8_gated_linear(x, allocate(96, 256, device=DEVICE))
    assert launched == ["fp8_linear"] * 2


@pytest.mark.parametrize("by_row", [False, True])
def test_fp8_launches_on_hopper_match_their_kernels(by_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    for module in (expert_tiles_cuda, float_at_once_cuda, fp8_at_once_cuda):
        monkeypatch.setattr(module, "load_kernel", cuda_sources.load_kernel)
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    allocate = Fp8Matrix.allocate_by_row if by_row else Fp8Matrix.allocate
    with PretendGpu():
        use_own_stream(DEVICE)
        weight = allocate(96, 2048, device=DEVICE)
        x, out = (torch.zeros(9, size, dtype=torch.bfloat16, device=DEVICE) for size in (2048, 48))
        fp8_at_once_cuda.launch_at_once(
            x, weight.values, weight.scales, None, out, row_group=weight.row_group, gated=True
        )
        router = torch.zeros(6, 2048, device=DEVICE)
        float_at_once_cuda.launch_float_at_once(x, router, torch.zeros(9, 6, device=DEVICE))
        gate_up, down = allocate(6, 256, 2048, device=DEVICE), allocate(6, 2048, 128, device=DEVICE)
        routing = route_reference(torch.zeros(9, 2, dtype=torch.int64), 0, 6, expert_tiles_cuda.TILE_ROWS)
        gated, results = (torch.zeros(18, size, dtype=torch.bfloat16, device=DEVICE) for size in (128, 2048))
        expert_tiles_cuda.launch_expert_tiles(x, gate_up, down, gated, results, routing)
    assert launched == ["fp8_at_once", "float_at_once", "expert_tiles", "expert_tiles"]


def test_selection_launch_matches_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    rule = SelectionRule(8, 8, 4, True, 2.5)
    with PretendGpu():
        use_own_stream(DEVICE)
        logits = torch.zeros(BATCH, 256, device=DEVICE)
        for bias in (None, logits[0]):
            select_and_route(logits, bias, rule, 0, 256, 8)
    assert launched == ["select_route"] * 2


@pytest.mark.parametrize("gated", [False, True])
def test_gemv_launch_matches_its_kernel(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    monkeypatch.setattr(gemv_cuda, "shared_memory", lambda _: 227 << 10)
    with PretendGpu():
        use_own_stream(DEVICE)
        x, weight = (torch.zeros(rows, 2048, dtype=torch.bfloat16, device=DEVICE) for rows in (2, 96))
        bias = torch.zeros(96, dtype=torch.bfloat16, device=DEVICE) if gated else None
        gemv_cuda.launch_gemv(x, weight, bias, x.new_zeros(2, 48 if gated else 96), gated=gated)
    assert launched == ["gemv"]


@pytest.mark.parametrize("biased", [False, True])
def test_norm_route_launch_matches_its_kernel(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    monkeypatch.setattr(norm_route_cuda, "shared_memory", lambda _: 227 << 10)
    with PretendGpu():
        use_own_stream(DEVICE)
        x, router = (torch.zeros(rows, 2048, dtype=torch.bfloat16, device=DEVICE) for rows in (2, 128))
        bias, rule = router[:, 0].clone() if biased else None, SelectionRule(8, 1, 1, not biased, 1.0)
        norm_route_cuda.add_norm_route(x, x, x[0], 1e-6, router, bias, rule)
    assert launched == ["norm_route"]


def test_plain_launch_matches_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    hopper(monkeypatch)
    with PretendGpu():
        use_own_stream(DEVICE)
        x, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16, device=DEVICE) for rows in (3, 96))
        linear(x, weight)
        gated_linear(x, weight)
    assert launched == ["plain_linear"] * 2


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fp8", "int4"])
def test_launches_for_the_experts_of_a_token_match_their_kernels(
    kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = recorded(monkeypatch)
    hopper(monkeypatch)

    def matrices(rows: int, columns: int) -> Weight:
        if kind == "fp8":
            weight = Fp8Matrix.allocate(4, rows, columns, device=DEVICE)
            weight.scales.fill_(1.0)
            return weight
        if kind == "int4":
            packed = GroupScaled.allocate(4, rows, columns, dtype=torch.bfloat16, device=DEVICE)
            assert packed.zeros is not None
            for part in (packed.packed, packed.scales, packed.zeros):
                part.zero_()
            return packed
        return torch.zeros(4, rows, columns, dtype=torch.bfloat16, device=DEVICE)

    with PretendGpu():
        use_own_stream(DEVICE)
        x = torch.ones(2, 256, dtype=torch.bfloat16, device=DEVICE)
        chosen = torch.tensor([[3, 0], [1, 2]], device=DEVICE)
        weights = torch.ones(2, 2, device=DEVICE)
        found = grouped_experts(
            x, weights, chosen, matrices(256, 256), matrices(256, 128), shared=x.clone if shared else None
        )
        assert found.shape == x.shape
    assert launched == ["expert_gates", "expert_sums"]


def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernels for few rows as on a GPU with the sizes of an H200."""
    monkeypatch.setattr(few_rows_cuda, "load_kernel", cuda_sources.load_kernel)
    monkeypatch.setattr(few_rows_cuda, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(few_rows_cuda, "shared_memory", lambda _: 227 << 10)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda args: args[:-1], "takes 8 arguments, not 7"),
        (lambda args: (*args[:-1], True), "is True, not an int"),
        (lambda args: (args[1], args[0], *args[2:]), r"argument 0 of select_top, float\*, is 128"),
    ],
)
def test_wrong_launch_arguments_are_detected(spoil: Callable[[Any], Any], message: str) -> None:
    address = torch.zeros(1).data_ptr()
    args = (address, 128, address, address, 1, address, TOP_K, address)
    cuda_sources.check_launch("dsa/select_top.cu", "select_top", args)
    with pytest.raises(AssertionError, match=message):
        cuda_sources.check_launch("dsa/select_top.cu", "select_top", spoil(args))


def test_kernel_that_does_not_compile_is_detected() -> None:
    with pytest.raises(AssertionError, match='identifier "COLUMNS" is undefined'):
        cuda_sources.load_kernel("linear/gemv.cu", "gemv", DEVICE, (("WARPS", 4), ("SLOTS", 2), ("HALF", 0)))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launched kernels, in order. Their arguments are checked."""
    launched: list[str] = []
    check = cuda_sources.check_launch

    def check_and_record(source: str, name: str, args: tuple[Any, ...]) -> None:
        check(source, name, args)
        launched.append(name)

    monkeypatch.setattr(cuda_sources, "check_launch", check_and_record)
    return launched


def test_every_kernel_takes_addresses_and_64_bit_integers() -> None:
    folders = {
        "attention": ("prefill_attention", "rope_decode"),
        "collectives": ("all_reduce",),
        "dsa": ("packed_mla", "select_top", "sparse_mla"),
        "hisparse": ("copy_misses", "swap_in", "write_back"),
        "linear": ("float_at_once", "fp8_at_once", "fp8_linear", "gemv", "plain_linear"),
        "mla": ("dense_mla",),
        "moe": ("expert_tiles", "norm_route", "select_route"),
        "nvfp4": ("nvfp4_linear",),
        "packed4": ("int4_linear",),
        "sampling": ("keep_top_p",),
    }
    sources = {name: f"{folder}/{name}.cu" for folder, names in folders.items() for name in names}
    sources |= {"gather_shares": "collectives/all_reduce.cu"}
    sources |= dict.fromkeys(("expert_gates", "expert_sums"), "linear/token_experts.cu")
    assert {str(path.relative_to(SOURCE_FOLDER)) for path in SOURCE_FOLDER.rglob("*.cu")} == set(sources.values())
    for name, source in sources.items():
        kinds = cuda_sources.parameters(source, name)
        assert all(kind.endswith("*") or kind == "long long" for kind in kinds), name


def test_top_p_launch_matches_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = recorded(monkeypatch)
    with PretendGpu():
        use_own_stream(DEVICE)
        logits = torch.zeros(BATCH, 64, device=DEVICE)
        keep_top_p(logits, torch.ones_like(logits, dtype=torch.int64), integers(BATCH, 1).long() + 7)
    assert launched == ["keep_top_p"]
