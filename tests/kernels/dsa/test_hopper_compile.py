"""Triton kernels of the indexer and of packed rows compile for Hopper, without a GPU. The interpreter does not check
types.
"""

import pytest

from tests.kernels.interpreter import INTERPRETED
from tests.kernels.triton_programs import run_program

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.dsa.index_topk_triton import _index_scores, _index_scores_of_few
from pdserve.kernels.dsa.latent_write_triton import _latent_write
from pdserve.kernels.dsa.packed_rows_triton import FUSED_TILE, _attend_packed, _unpack_pages, _unpack_rows
from pdserve.kernels.dsa.rotate_queries_triton import _rotate_queries

FP8_POINTERS = {"key_pages_ptr", "index_query_ptr", "query_ptr", "key_ptr"}
FLOAT_POINTERS = {"key_scales_ptr", "scales_ptr", "query_scale_ptr", "key_scale_ptr", "weights_ptr", "scores_ptr"}
INT_POINTERS = {"rows_ptr", "key_rows_ptr", "table_ptr", "sequence_ptr", "visible_ptr"}
PACKED = {
    **dict.fromkeys(("rows_ptr", "places_ptr", "sources_ptr", "count_ptr"), "*i32"),
    **dict.fromkeys(("partial_ptr", "log_sum_ptr"), "*fp32"),
    **dict.fromkeys(("query_ptr", "out_ptr"), "*bf16"),
    "pages_ptr": "*u8",
    "scale_log2": "fp32",
}


def compile_packed(kernel, warps, stages, **constants):
    # pointers and strides are multiples of 16 bytes, as in a pool; returns PTX and bytes of shared memory
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else PACKED.get(name, "i32") for name in names}
    values = {(number,): constants[name] for number, name in enumerate(names) if name in constants}
    even = [number for number, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    attributes = {(number,): [["tt.divisibility", 16]] for number in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def compile_kernel(kernel, warps, stages, plain=(), **constants):
    signature, values = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[number,] = "constexpr", constants[name]
        elif name in plain or name not in FP8_POINTERS | FLOAT_POINTERS | INT_POINTERS:
            signature[name] = "*bf16" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        else:
            signature[name] = "*fp8e4nv" if name in FP8_POINTERS else "*fp32" if name in FLOAT_POINTERS else "*i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


rope = {"HALF": 32, "BLOCK_HALF": 32, "OVERLAP": False}
for interleaved in (False, True):
    latent = {"Q": 1536, "BLOCK_Q": 2048, "KV": 512, "BLOCK_KV": 512, "KEY": 128, "BLOCK_KEY": 128}
    pages = {"PAGE": 16, "KEY_PAGE": 16, "PACKED": False, "FP8_KEYS": True, "INTERLEAVED": interleaved}
    assert "e4m3x2.f32" in compile_kernel(_latent_write, 4, 3, **rope, **latent, **pages)
    heads = {"HEADS": 128, "HEAD_DIM": 192, "INDEX_HEADS": 64, "INDEX_DIM": 128, "REST": 64, "BLOCK_REST": 64}
    queries = {"BLOCK_H": 16, "FP8": True, "INTERLEAVED": interleaved}
    assert "e4m3x2.f32" in compile_kernel(_rotate_queries, 4, 3, {"query_ptr"}, **rope, **heads, **queries)
geometry = {"HEADS": 64, "BLOCK_H": 64, "D": 128, "BLOCK_D": 128, "PAGE": 64, "BLOCK": 128, "PRECISION": "tf32"}
for kernel, tokens, warps in ((_index_scores, 4, 4), (_index_scores_of_few, 32, 4)):
    assert "e4m3.e4m3" in compile_kernel(kernel, warps, 5, BLOCK_T=tokens, FP8=True, OVERLAP=False, **geometry)
geometry = {"KV": 512, "BLOCK_KV": 512, "ROPE": 64, "BLOCK_ROPE": 64, "PAGE": 64, "ROWS": 8, "OVERLAP": True}
for kernel in (_unpack_rows, _unpack_pages):
    ptx, _ = compile_packed(kernel, 4, 3, **geometry)
    assert ptx.count("ld.global.v4") == 2, "16 bytes of fp8 per load"
geometry = {"HEADS": 16, "BLOCK_H": 16, "VALUE": 512, "BLOCK_V": 512, "REST": 64, "BLOCK_R": 64, "PAGE": 64}
options = {"BLOCK": FUSED_TILE.rows, "BLOCK_SHARE": 512, "PRECISION": "tf32", "OVERLAP": True}
for alone in (False, True):
    sizes = {**geometry, **options, "ALONE": alone}
    ptx, shared = compile_packed(_attend_packed, FUSED_TILE.num_warps, FUSED_TILE.num_stages, **sizes)
    assert shared <= 227 << 10
    assert "cp.async" not in ptx
    assert "ldmatrix" in ptx
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_kernels_compile() -> None:
    code, errors = run_program(PROGRAM)
    assert code == 0, errors
