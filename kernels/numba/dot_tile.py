"""The innermost loop of linear.py in this folder, in LLVM instructions: products of some rows of two matrices.

    sums[i, j]  =  sum_k weight[i, k] * x[j, k]        for i < WEIGHT_ROWS, j < x_rows

All sums stay in registers, and the next weights are prefetched into the cache at the same time. Otherwise memory is
idle while the processor multiplies, and the processor is idle while it waits for memory. Numba can express neither, and
its code for plain loops takes up to twice as long.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _registers() -> tuple[int, int]:
    """Floats per vector register of this CPU, and the rows of weights whose sums fit into its registers."""
    features = get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 4
    return (8, 2) if features.get("avx2") else (4, 4)


LANES, WEIGHT_ROWS = _registers()

_INT, _FLOAT, _BYTE_POINTER = ir.IntType(64), ir.FloatType(), ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FUSED = ("contract",)


def make_dot_tile(most_rows: int, *, fetch: bool = True) -> Any:
    """The function for tiles of up to `most_rows` (at most 4) rows of x. Without `fetch` nothing is prefetched: the
    weights are in the cache already.
    """

    @intrinsic
    def dot_tile(_context, weight, weight_rows, x, x_rows, ahead, ahead_rows, size):
        """In a kernel: the sums as a tuple, row by row. `weight`, `x` and `ahead` (to prefetch) are addresses of
        contiguous rows of `size` float32. If there are fewer rows than a tile has, the last one is repeated.
        """
        count = WEIGHT_ROWS * most_rows
        signature = types.UniTuple(types.float32, count)(weight, weight_rows, x, x_rows, ahead, ahead_rows, size)

        def generate(context, builder, signature, arguments):
            weight, weight_rows, x, x_rows, ahead, ahead_rows, size = arguments
            row_bytes = builder.mul(size, _int(4))
            vector_bytes = builder.and_(row_bytes, _int(-4 * LANES))
            weights = row_addresses(builder, weight, weight_rows, row_bytes, WEIGHT_ROWS)
            xs = row_addresses(builder, x, x_rows, row_bytes, most_rows)
            fetched = row_addresses(builder, ahead, ahead_rows, row_bytes, WEIGHT_ROWS) if fetch else []
            sums = [zero(_VECTOR)] * count
            sums = _add_products(builder, weights, xs, fetched, _int(0), vector_bytes, _VECTOR, sums)
            sums = [add_lanes(builder, lanes) for lanes in sums]
            # the remaining columns do not fill a register
            sums = _add_products(builder, weights, xs, [], vector_bytes, row_bytes, _FLOAT, sums)
            return context.make_tuple(builder, signature.return_type, sums)

        return signature, generate

    return dot_tile


def _add_products(
    builder: ir.IRBuilder,
    weights: list[ir.Value],
    xs: list[ir.Value],
    fetched: list[ir.Value],
    start: ir.Value,
    end: ir.Value,
    item: ir.Type,
    sums: list[ir.Value],
) -> list[ir.Value]:
    """A loop over bytes [start, end) of the rows, one `item` at a time; returns the new sums."""
    before = builder.block
    body, after = builder.append_basic_block("products"), builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed("<", start, end), body, after)
    builder.position_at_end(body)
    at = builder.phi(_INT)
    at.add_incoming(start, before)
    running = [builder.phi(item) for _ in sums]
    for address in fetched:
        prefetch(builder, builder.add(address, at))
    factors = [load(builder, builder.add(address, at), item) for address in xs]
    added: list[ir.Value] = []
    for address in weights:
        factor = load(builder, builder.add(address, at), item)
        for x in factors:
            product = builder.fmul(factor, x, flags=_FUSED)
            added.append(builder.fadd(running[len(added)], product, flags=_FUSED))
    following = builder.add(at, _int(4 * (LANES if item == _VECTOR else 1)))
    at.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, after)
    builder.position_at_end(after)
    results = [builder.phi(item) for _ in sums]
    for phi, result, first, last in zip(running, results, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, body)
        result.add_incoming(first, before)
        result.add_incoming(last, body)
    return results


def row_addresses(
    builder: ir.IRBuilder, first: ir.Value, rows: ir.Value, row_bytes: ir.Value, count: int
) -> list[ir.Value]:
    """Addresses of `count` rows; that of the last one is repeated if there are fewer."""
    last = builder.sub(rows, _int(1))
    indices = [builder.select(builder.icmp_signed("<", _int(i), last), _int(i), last) for i in range(count)]
    return [builder.add(first, builder.mul(index, row_bytes)) for index in indices]


def load(builder: ir.IRBuilder, address: ir.Value, item: ir.Type) -> ir.Value:
    """Floats at an address."""
    return builder.load(builder.inttoptr(address, item.as_pointer()), align=4)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Read a cache line ahead of its use; any address is allowed."""
    flag = ir.IntType(32)
    function = _llvm_function(builder, "llvm.prefetch.p0", ir.VoidType(), _BYTE_POINTER, flag, flag, flag)
    to_read, into_every_cache, of_data = flag(0), flag(3), flag(1)
    builder.call(function, [builder.inttoptr(address, _BYTE_POINTER), to_read, into_every_cache, of_data])


def add_lanes(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of a register."""
    function = _llvm_function(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", _FLOAT, _FLOAT, _VECTOR)
    return builder.call(function, [zero(_FLOAT), vector], fastmath=("reassoc", "nsz"))


def _llvm_function(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _int(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)


def zero(item: ir.Type) -> ir.Constant:
    return ir.Constant(item, [0.0] * LANES if item == _VECTOR else 0.0)
