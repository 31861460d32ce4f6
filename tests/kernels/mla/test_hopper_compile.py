"""Triton kernels of the indexer compile for Hopper, without a GPU: the interpreter does not check types."""

import os
import subprocess
import sys

import pytest

from tests.kernels.interpreter import INTERPRETED

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.mla.index_topk_triton import _index_scores, _index_scores_of_few
from pdserve.kernels.mla.latent_write_triton import _latent_write
from pdserve.kernels.mla.rotate_queries_triton import _rotate_queries

FP8_POINTERS = {"key_pages_ptr", "index_query_ptr", "query_ptr", "key_ptr"}
FLOAT_POINTERS = {"key_scales_ptr", "scales_ptr", "query_scale_ptr", "key_scale_ptr", "weights_ptr", "scores_ptr"}
INT_POINTERS = {"rows_ptr", "key_rows_ptr", "table_ptr", "sequence_ptr", "visible_ptr"}


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
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_kernels_of_fp8_keys_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
