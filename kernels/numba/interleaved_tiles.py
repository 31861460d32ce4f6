"""Multiplies interleaved GGUF blocks (../gguf/interleaved.py), in LLVM instructions, by rows of x whose elements are
16-bit integers with a scale per 32 of them.

    sum of a tile  =  scale * x_scale * sum(integer * x_integer)  +  offset * x_sum

The inner sum is exact: 32 products of 16 and at most 8 bits. A shift and a mask make the operands of weights.

    AVX-512   vpdpwssd (without VNNI pmaddwd and an addition) multiplies 32 pairs of 16 bits, twice as many as an
              instruction for float32
    AVX2      two pmaddwd, each with half of these
    NEON      sdot multiplies 16 pairs of 8 bits, so x_integer = 256 * high + low takes two for 16 weights; smlal
              multiplies 4 pairs of 16 bits, and half as many start per cycle

A packed row of x has, for each 32 elements, x_scale and x_sum (float32) and then the integers, 72 bytes. For NEON these
are the high and then the low bytes of each 8 elements, in the order in which a register has their weights.

Lower bound of NEON for a tile of Q4_1, 512 weights, and one row of x: 64 sdot, 32 instructions to make their operands
and 32 for scales and sums, of which the 12 conversions take a pipe for two cycles: 70 cycles of the two pipes of
Neoverse-N1, where smlal alone would take 128. Measured: 82.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, initialize_native_asmparser
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..backends.dispatch import NEON
from ..gguf.blocks import block_size, ggml_number
from ..gguf.interleaved import GROUP_ROWS, HALVES, LARGEST, SMALLEST, TILE_COLUMNS
from .dot_tile import prefetch, row_addresses
from .gguf_blocks import cases

PACKED_BYTES = 8 + 2 * TILE_COLUMNS
"""Of 32 elements of x."""

_HAS_VNNI, _HAS_AVX512 = (bool(get_host_cpu_features().get(name)) for name in ("avx512vnni", "avx512bw"))
AVX2 = not NEON and not _HAS_AVX512
if _HAS_VNNI or NEON:
    initialize_native_asmparser()  # for `_add_products` and `_add_dot`; Numba needs none
_LONG, _INT, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, GROUP_ROWS), ir.VectorType(_FLOAT, GROUP_ROWS)
_PAIRS = ir.VectorType(_SHORT, 2 * GROUP_ROWS)
_SUM_LANES = 4 if NEON else GROUP_ROWS
"""Rows of weights whose sums are in one register."""
_SUMS, _INT_SUMS = ir.VectorType(_FLOAT, _SUM_LANES), ir.VectorType(_INT, _SUM_LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * _SUM_LANES)
_FUSED = ("contract",)
_REGISTER_BYTES, _CACHE_LINE = 64, 64
_AHEAD_BYTES = 512 if NEON else 2048
"""How far ahead of the multiplication weights are fetched into the cache."""
_TOGETHER = 4
"""Rows of x whose NEON instructions alternate. A dot product waits for the one before it with the same sum; the sums of
four rows let two start per cycle, and leave enough registers.
"""


def make_multiply(x_rows: int, weight_rows: int) -> Any:
    """The function for `x_rows` rows of x and `weight_rows` of the 16 rows of a group at a time."""

    @intrinsic
    def multiply(_context, number, source, first_row, tiles, x, x_bytes, rows, target):
        """In a kernel: products of rows `first_row` and following of the group at `source`, of `tiles` tiles of the
        ggml type `number`, with packed rows of x, `x_bytes` apart; stores their part of `x_rows` times 16 floats at
        `target`. If there are fewer `rows`, results of the last one are repeated.
        """

        def generate(_context, builder, _signature, arguments):
            number, source, first_row, tiles, x, x_bytes, rows, target = arguments
            xs = row_addresses(builder, x, rows, x_bytes, x_rows)
            target = builder.add(target, builder.mul(first_row, _LONG(4)))
            registers = weight_rows // _SUM_LANES
            with cases(builder, number, HALVES) as (before, done, types_):
                for name in types_:
                    at, x_at, left = builder.phi(_LONG), builder.phi(_LONG), builder.phi(_LONG)
                    sums = [builder.phi(_SUMS) for _ in range(x_rows * registers)]
                    body = builder.block
                    columns = [builder.add(each, x_at) for each in xs]
                    _prefetch_tile(builder, name, at)
                    if NEON:
                        added = _add_tile_neon(builder, name, at, first_row, columns, sums)
                    else:
                        added = _add_tile_avx(builder, name, at, columns, sums)
                    remaining = builder.sub(left, _LONG(1))
                    for phi, first, last in (
                        (at, source, builder.add(at, _LONG(_tile_bytes(name)))),
                        (x_at, _LONG(0), builder.add(x_at, _LONG(PACKED_BYTES))),
                        (left, tiles, remaining),
                        *((phi, _filled(_SUMS, 0.0), last) for phi, last in zip(sums, added, strict=True)),
                    ):
                        phi.add_incoming(first, before)
                        phi.add_incoming(last, body)
                    after = builder.append_basic_block()
                    builder.cbranch(builder.icmp_signed(">", remaining, _LONG(0)), body, after)
                    builder.position_at_end(after)
                    for index, lanes in enumerate(added):
                        row, part = divmod(index, registers)
                        _store(builder, lanes, target, 4 * (row * GROUP_ROWS + part * _SUM_LANES))
                    builder.branch(done)

        return types.void(number, source, first_row, tiles, x, x_bytes, rows, target), generate

    return multiply


@intrinsic
def pack_row(_context, number, source, tiles, target):
    """In a kernel: pack the floats at `source`, 32 for each of `tiles`, to `target`, for weights of the ggml type
    `number`. NaN becomes a NaN scale.
    """

    def generate(_context, builder, _signature, arguments):
        number, source, tiles, target = arguments
        with cgutils.for_range(builder, tiles) as loop:
            at = builder.add(source, builder.mul(loop.index, _LONG(4 * TILE_COLUMNS)))
            out = builder.add(target, builder.mul(loop.index, _LONG(PACKED_BYTES)))
            parts = [_load(builder, _FLOATS, at, first * _REGISTER_BYTES) for first in range(2)]
            # magnitudes of floats are ordered like their bits, and NaN is the largest
            bits = [builder.and_(builder.bitcast(part, _INTS), _filled(_INTS, 0x7FFFFFFF)) for part in parts]
            larger = builder.select(builder.icmp_unsigned(">", bits[0], bits[1]), bits[0], bits[1])
            largest = builder.bitcast(_call(builder, "llvm.vector.reduce.umax.v16i32", _INT, larger), _FLOAT)
            scale = builder.fdiv(largest, _FLOAT(LARGEST))
            some = builder.fcmp_unordered(">=", largest, _FLOAT(SMALLEST))
            factor = builder.select(some, builder.fdiv(_FLOAT(LARGEST), largest), _FLOAT(0.0))
            total: Any = _filled(_INTS, 0)
            for first, part in enumerate(parts):
                scaled = builder.fmul(part, _spread(builder, factor, GROUP_ROWS))
                whole = _call(builder, "llvm.rint.v16f32", _FLOATS, scaled)
                integers = _call(builder, "llvm.fptosi.sat.v16i32.v16f32", _INTS, whole)  # 0 for NaN
                short = builder.trunc(integers, ir.VectorType(_SHORT, GROUP_ROWS))
                packed = _split_bytes(builder, number, short) if NEON else short
                _store(builder, packed, out, 8 + first * _REGISTER_BYTES // 2)
                total = builder.add(total, integers)
            summed = builder.sitofp(_call(builder, "llvm.vector.reduce.add.v16i32", _INT, total), _FLOAT)
            _store(builder, scale, out, 0)
            _store(builder, builder.fmul(scale, summed), out, 4)

    return types.void(number, source, tiles, target), generate


def _split_bytes(builder: ir.IRBuilder, number: ir.Value, integers: ir.Value) -> ir.Value:
    """16 integers of x for `_add_tile_neon`: of each 8 the high bytes, then the low ones. In the low halves of four
    bytes of Q4 are columns 0, 4, 1 and 5, in the high ones 2, 6, 3 and 7; two times four bytes of Q8_0 are 0, 2, 1, 3
    and 4, 6, 5, 7.
    """
    shorts, eight = integers.type, _filled(integers.type, 8)
    item = ir.VectorType(ir.IntType(8), shorts.count)
    low = builder.trunc(integers, item)
    high = builder.trunc(builder.ashr(builder.add(integers, _filled(shorts, 128)), eight), item)

    def ordered(*order: int) -> ir.Value:
        lanes = [part * shorts.count + first + at for first in (0, 8) for part in range(2) for at in order]
        return builder.shuffle_vector(high, low, ir.Constant(ir.VectorType(_INT, len(lanes)), lanes))

    is_q8 = builder.icmp_signed("==", number, ir.Constant(number.type, ggml_number("Q8_0")))
    return builder.select(is_q8, ordered(0, 2, 1, 3, 4, 6, 5, 7), ordered(0, 4, 1, 5, 2, 6, 3, 7))


def _prefetch_tile(builder: ir.IRBuilder, name: str, address: ir.Value) -> None:
    for line in range(0, _tile_bytes(name), _CACHE_LINE):
        prefetch(builder, builder.add(address, _LONG(_AHEAD_BYTES + line)))


def _add_tile_avx(
    builder: ir.IRBuilder, name: str, address: ir.Value, xs: list[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """The sums plus the products of a tile with 32 columns of x, packed at addresses `xs`."""
    # for a single row, two sums: an addition takes longer than the processor needs to start the next one
    chains = 2 if len(xs) == 1 else 1
    integers: list[list[Any]] = [[_filled(_INTS, 0)] * chains for _ in xs]
    for number, pairs in enumerate(_pairs(builder, name, address)):
        for x, running in zip(xs, integers, strict=True):
            factor = _spread(builder, _load(builder, _INT, x, 8 + 4 * number))
            running[number % chains] = _add_products(builder, running[number % chains], pairs, factor)
    scale, offset = _scales(builder, name, address)
    results = []
    for total, x, parts in zip(sums, xs, integers, strict=True):
        products = parts[0] if chains == 1 else builder.add(*parts)
        results.append(_add_scaled(builder, total, products, scale, offset, x))
    return results


def _add_tile_neon(
    builder: ir.IRBuilder,
    name: str,
    address: ir.Value,
    first_row: ir.Value,
    xs: list[ir.Value],
    sums: list[ir.Value],
) -> list[ir.Value]:
    """The same for some rows of weights, four at a time: their 32 columns stay in 8 registers for all rows of x."""
    registers = len(sums) // len(xs)
    results = list(sums)
    halves_at = builder.add(address, builder.mul(first_row, _LONG(2)))
    integers_at = builder.add(address, builder.mul(first_row, _LONG(4)))
    for part in range(registers):
        weights = list(_byte_columns(builder, name, integers_at, part))
        scale, offset = _scales(builder, name, halves_at, part)
        for first in range(0, len(xs), _TOGETHER):
            rows = range(first, min(first + _TOGETHER, len(xs)))
            high: list[Any] = [_filled(_INT_SUMS, 0)] * len(rows)
            low = list(high)
            for step in range(0, len(weights), 2):
                for index, row in enumerate(rows):
                    factors = _load(builder, _BYTES, xs[row], 8 + 8 * step)
                    for at in range(2):
                        high[index] = _add_dot(builder, high[index], weights[step + at], factors, at)
                        low[index] = _add_dot(builder, low[index], weights[step + at], factors, 2 + at)
            for index, row in enumerate(rows):
                products = builder.add(builder.shl(high[index], _filled(_INT_SUMS, 8)), low[index])
                at = row * registers + part
                results[at] = _add_scaled(builder, sums[at], products, scale, offset, xs[row])
    return results


def _add_scaled(
    builder: ir.IRBuilder,
    total: ir.Value,
    integers: ir.Value,
    scale: ir.Value,
    offset: ir.Value | None,
    x: ir.Value,
) -> ir.Value:
    """`total` plus the sum of a tile (see the module docstring), of which `integers` is the inner sum."""
    products = builder.sitofp(integers, _SUMS)
    both = builder.fmul(scale, _spread(builder, _load(builder, _FLOAT, x, 0)))
    total = builder.fadd(total, builder.fmul(products, both, flags=_FUSED), flags=_FUSED)
    if offset is None:
        return total
    x_sum = _spread(builder, _load(builder, _FLOAT, x, 4))
    return builder.fadd(total, builder.fmul(offset, x_sum, flags=_FUSED), flags=_FUSED)


def _add_products(builder: ir.IRBuilder, total: ir.Value, pairs: ir.Value, factors: ir.Value) -> ir.Value:
    """`total` plus both products of each pair."""
    if _HAS_VNNI:  # as assembly, because LLVM splits its own function for it into pmaddwd and an addition
        kind = ir.FunctionType(_INTS, (_INTS, _PAIRS, _INTS))
        return builder.asm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v", (total, pairs, factors), side_effect=False)
    factors = builder.bitcast(factors, _PAIRS)
    if not AVX2:
        return builder.add(total, _call(builder, "llvm.x86.avx512.pmaddw.d.512", _INTS, pairs, factors))
    lanes = [ir.Constant(_INTS, list(range(first, first + GROUP_ROWS))) for first in (0, GROUP_ROWS)]
    parts = []
    for half in lanes:
        operands = (builder.shuffle_vector(each, each, half) for each in (pairs, factors))
        parts.append(_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_INT, GROUP_ROWS // 2), *operands))
    return builder.add(total, builder.shuffle_vector(*parts, lanes[0]))


def _add_dot(builder: ir.IRBuilder, total: ir.Value, weights: ir.Value, factors: ir.Value, lane: int) -> ir.Value:
    """`total` plus, for each row, four products with the four bytes of a lane of `factors`."""
    kind = ir.FunctionType(_INT_SUMS, (_INT_SUMS, _BYTES, _BYTES))
    # as assembly: LLVM's intrinsic aborts the process if LLVM does not know that this processor has the instruction
    code = f".arch_extension dotprod\nsdot $0.4s, $2.16b, $3.4b[{lane}]"
    return builder.asm(kind, code, "=w,0,w,w", (total, weights, factors), side_effect=False)


def _scales(builder: ir.IRBuilder, name: str, address: ir.Value, part: int = 0) -> tuple[ir.Value, ir.Value | None]:
    """Scales of a tile and, if its type has them, offsets, of the part'th _SUM_LANES rows."""
    stored = ir.VectorType(ir.HalfType(), _SUM_LANES)
    halves = [
        builder.fpext(_load(builder, stored, address, 2 * (at * GROUP_ROWS + part * _SUM_LANES)), _SUMS)
        for at in range(HALVES[name])
    ]
    if name == "Q4_0":
        return halves[0], builder.fmul(halves[0], _filled(_SUMS, -8.0))
    return halves[0], (halves[1] if len(halves) > 1 else None)


def _pairs(builder: ir.IRBuilder, name: str, address: ir.Value) -> Iterator[ir.Value]:
    """Integers of columns 0 and 1, 2 and 3, ... of a tile: 16 bits each, a pair for each of 16 rows."""
    for at in range(32 * HALVES[name], _tile_bytes(name), _REGISTER_BYTES):
        words = _load(builder, _PAIRS, address, at)
        if name == "Q8_0":
            eight = _filled(_PAIRS, 8)
            yield builder.ashr(builder.shl(words, eight), eight)
            yield builder.ashr(words, eight)
        else:
            for shift in (0, 4, 8, 12):
                yield builder.and_(builder.lshr(words, _filled(_PAIRS, shift)), _filled(_PAIRS, 15))


def _byte_columns(builder: ir.IRBuilder, name: str, address: ir.Value, part: int) -> Iterator[ir.Value]:
    """Integers of a tile in 8 bits for `sdot`: registers with four columns of each of four rows."""
    for at in range(32 * HALVES[name], _tile_bytes(name), _REGISTER_BYTES):
        stored = _load(builder, _BYTES, address, at + 4 * part * _SUM_LANES)
        if name == "Q8_0":
            yield stored
        else:
            yield builder.and_(stored, _filled(_BYTES, 15))
            yield builder.lshr(stored, _filled(_BYTES, 4))


def _tile_bytes(name: str) -> int:
    return GROUP_ROWS * block_size(name)[1]


def _filled(item: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(item, [value] * item.count)


def _spread(builder: ir.IRBuilder, value: ir.Value, lanes: int = _SUM_LANES) -> ir.Value:
    """A register filled with a value."""
    item = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(item, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, one, _filled(ir.VectorType(_INT, lanes), 0))


def _load(builder: ir.IRBuilder, item: ir.Type, address: ir.Value, offset: int) -> ir.Value:
    return builder.load(builder.inttoptr(builder.add(address, _LONG(offset)), item.as_pointer()), align=1)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int) -> None:
    pointer = builder.inttoptr(builder.add(address, _LONG(offset)), value.type.as_pointer())
    builder.store(value, pointer, align=1)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
