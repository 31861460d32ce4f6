"""Triton kernels of 4-bit weights compile for Hopper, without a GPU. The interpreter does not check types, and does not
run inline assembly.
"""

import pytest

from tests.kernels.interpreter import INTERPRETED
from tests.kernels.triton_programs import run_program

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.packed4.expand_triton import _expand
from pdserve.kernels.moe.expert_gate_triton import _expert_gate
from pdserve.kernels.moe.packed_experts_triton import _packed_experts

TYPES = {"packed_ptr": "*u8", "sums_ptr": "*fp32", "counters_ptr": "*i32", "limit": "fp32"}
TYPES |= {f"{name}_ptr": "*i32" for name in ("order", "ends", "expert", "first")}


def compile_kernel(kernel, dtype, warps, types=None, **constants):
    signature, values, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[number,] = "constexpr", constants[name]
            continue
        signature[name] = (TYPES | (types or {})).get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        if name not in ("rows", "splits", "limit"):
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


expand = compile_kernel(_expand, "bf16", 4, GROUP=128, ROWS=32, MXFP4=False, OVERLAP=True)
assert "fma.rn.bf16x2" in expand
assert "ld.global.v4.b32" in expand
assert "st.global.v4.b32" in expand

common = {"GATHER": True, "SCATTER": False, "PER_TOKEN": 8, "WHOLE": True, "PRECISION": "tf32", "OVERLAP": True}
of_integers = {"GROUP": 128, "MXFP4": False, "CLAMPED": False, "BIAS": False, "bias_ptr": None}
few = compile_kernel(_packed_experts, "bf16", 2, ROWS=16, OUTPUTS=64, GATED=True, SPLIT=True, **of_integers, **common)
assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in few
assert "fma.rn.bf16x2" in few
assert "cp.async.cg.shared.global" in few, "loads of weights are not pipelined"
many = compile_kernel(
    _packed_experts, "fp16", 8, ROWS=64, OUTPUTS=128, GATED=False, SPLIT=False, **of_integers, **common
)
assert "fma.rn.f16x2" in many
of_mxfp4 = {"types": {"scales_ptr": "*u8"}, "GROUP": 32, "MXFP4": True, "CLAMPED": True, "BIAS": True}
of_mxfp4 |= {"zeros_ptr": None}
many = compile_kernel(
    _packed_experts, "bf16", 8, ROWS=64, OUTPUTS=128, GATED=True, SPLIT=False, **of_mxfp4, **common
)
assert "fma.rn.bf16x2" in many
expand_mxfp4 = {"types": {"scales_ptr": "*u8"}, "zeros_ptr": None, "MXFP4": True}
expand = compile_kernel(_expand, "bf16", 4, GROUP=32, ROWS=128, OVERLAP=True, **expand_mxfp4)
assert "fma.rn.bf16x2" in expand
assert "st.global.v4.b32" in expand
clamped = {"GATED": True, "CLAMPED": True, "BIAS": True}
for gate in (clamped, clamped | {"CLAMPED": False}, {"GATED": False, "CLAMPED": False, "BIAS": True}):
    compile_kernel(_expert_gate, "bf16", 4, EXPERTS=32, BLOCK=1024, OVERLAP=True, **gate)
compile_kernel(
    _expert_gate, "bf16", 4, bias_ptr=None, GATED=True, CLAMPED=False, BIAS=False, EXPERTS=8, BLOCK=64, OVERLAP=True
)
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_int4_kernels_compile() -> None:
    code, errors = run_program(PROGRAM)
    assert code == 0, errors
