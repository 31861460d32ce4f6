"""Reads GGUF blocks (../gguf/blocks.py) in LLVM instructions: to unpack them, or to multiply them by one row of x.

    weight  =  integer * scale + offset

Unpacked weights are those of the `gguf` library to the last bit: scales have 11 bits and 6 more for K-quants, integers
up to 5, so products are exact wherever something is added to them, and one rounding remains.

A type is a generator that yields the integers of a block in their order, a register (`LANES`) at a time, so that the
same code is compiled for AVX-512, AVX2 and NEON. Formats are those of ggml's `ggml-common.h`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..gguf.blocks import block_size, ggml_number
from .dot_tile import LANES, WEIGHT_ROWS, add_lanes, load, prefetch, row_addresses, zero

_LONG, _INT, _BYTE, _HALF, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.HalfType(), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_FUSED = ("contract",)
_CACHE_LINE = 64


class _Block:
    """Reads parts of the block at an address."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self._builder = builder
        self._address = address

    def halves(self, offset: int, count: int) -> list[ir.Value]:
        """Registers, each filled with one of `count` adjacent float16."""
        stored = self._load(offset, ir.VectorType(_HALF, count))
        values = self._builder.fpext(stored, ir.VectorType(_FLOAT, count))
        return [self.lane(values, index) for index in range(count)]

    def unsigned(self, offset: int, count: int = LANES) -> ir.Value:
        """`count` bytes as 32-bit integers."""
        return self._builder.zext(self._load(offset, ir.VectorType(_BYTE, count)), ir.VectorType(_INT, count))

    def signed(self, offset: int, count: int = LANES) -> ir.Value:
        """The same for signed bytes."""
        return self._builder.sext(self._load(offset, ir.VectorType(_BYTE, count)), ir.VectorType(_INT, count))

    def half_bytes(self, offset: int, half: int) -> ir.Value:
        """The low (0) or high (1) halves of bytes."""
        stored = self.unsigned(offset)
        return self.shifted(stored, 4) if half else self.masked(stored, 15)

    def bits(self, offset: int, first: int) -> ir.Value:
        """Bits [first, first + LANES) of the 32 at `offset`, each as 0 or 16."""
        word = self.lane(self._load(offset, ir.VectorType(_INT, 1)), 0)
        positions = ir.Constant(word.type, [first + lane for lane in range(LANES)])
        return self.shifted(self.masked(self._builder.lshr(word, positions), 1), -4)

    def shifted(self, values: ir.Value, count: int) -> ir.Value:
        """Integers shifted to the right, or to the left if `count` is negative."""
        if count == 0:
            return values
        by = _filled(values.type, abs(count))
        return self._builder.lshr(values, by) if count > 0 else self._builder.shl(values, by)

    def masked(self, values: ir.Value, mask: int) -> ir.Value:
        return self._builder.and_(values, _filled(values.type, mask))

    def either(self, values: ir.Value, others: ir.Value) -> ir.Value:
        return self._builder.or_(values, others)

    def minus(self, values: ir.Value, number: int) -> ir.Value:
        """Integers less a number."""
        return self._builder.sub(values, _filled(values.type, number))

    def times(self, values: ir.Value, number: float) -> ir.Value:
        """Floats times a number."""
        return self._builder.fmul(values, _filled(values.type, number))

    def scales(self, integers: ir.Value, scale: ir.Value) -> ir.Value:
        """Integers times a scale, which fills a register."""
        count = integers.type.count
        floats = self._builder.sitofp(integers, ir.VectorType(_FLOAT, count))
        return self._builder.fmul(floats, self.lane(scale, 0, count))

    def lane(self, values: ir.Value, index: int, count: int = LANES) -> ir.Value:
        """`count` lanes filled with one of the values."""
        return self._builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(_INT, count), [index] * count))

    def joined(self, values: ir.Value, others: ir.Value) -> ir.Value:
        count = 2 * values.type.count
        return self._builder.shuffle_vector(values, others, ir.Constant(ir.VectorType(_INT, count), list(range(count))))

    def _load(self, offset: int, item: ir.Type) -> ir.Value:
        address = self._builder.add(self._address, _LONG(offset))
        return self._builder.load(self._builder.inttoptr(address, item.as_pointer()), align=1)


def _filled(item: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(item, [value] * item.count)


def _nibbles(block: _Block, offset: int, size: int) -> Iterator[tuple[int, ir.Value]]:
    """The low halves of `size` bytes, then the high ones, with the number of the first of a register."""
    for half in range(2):
        for first in range(0, size, LANES):
            yield half * size + first, block.half_bytes(offset + first, half)


_Part = tuple[ir.Value, ir.Value, ir.Value | None]
"""Integers of a register, and their scale and offset, the same objects as long as they do not change."""


def _q4_0(block: _Block) -> Iterator[_Part]:
    (scale,) = block.halves(0, 1)
    offset = block.times(scale, -8)
    for _, low in _nibbles(block, 2, 16):
        yield low, scale, offset


def _q4_1(block: _Block) -> Iterator[_Part]:
    scale, offset = block.halves(0, 2)
    for _, low in _nibbles(block, 4, 16):
        yield low, scale, offset


def _q5_0(block: _Block) -> Iterator[_Part]:
    (scale,) = block.halves(0, 1)
    offset = block.times(scale, -16)
    for first, low in _nibbles(block, 6, 16):
        yield block.either(low, block.bits(2, first)), scale, offset


def _q5_1(block: _Block) -> Iterator[_Part]:
    scale, offset = block.halves(0, 2)
    for first, low in _nibbles(block, 8, 16):
        yield block.either(low, block.bits(4, first)), scale, offset


def _q8_0(block: _Block) -> Iterator[_Part]:
    (scale,) = block.halves(0, 1)
    for first in range(0, 32, LANES):
        yield block.signed(2 + first), scale, None


def _k_scales(block: _Block) -> tuple[ir.Value, ir.Value]:
    """Scales and offsets of the eight groups of 32 weights of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    scale, least = block.halves(0, 2)
    low, low_offset, high = (block.unsigned(at, 4) for at in (4, 8, 12))
    highest = [block.masked(block.shifted(each, 2), 48) for each in (low, low_offset)]
    factors = block.joined(block.masked(low, 63), block.either(block.masked(high, 15), highest[0]))
    offsets = block.joined(block.masked(low_offset, 63), block.either(block.shifted(high, 4), highest[1]))
    return block.scales(factors, scale), block.scales(offsets, block.times(least, -1))


def _q4_k(block: _Block) -> Iterator[_Part]:
    scales, offsets = _k_scales(block)
    for group in range(8):
        scale, offset = block.lane(scales, group), block.lane(offsets, group)
        for first in range(0, 32, LANES):
            yield block.half_bytes(16 + 32 * (group // 2) + first, group % 2), scale, offset


def _q5_k(block: _Block) -> Iterator[_Part]:
    scales, offsets = _k_scales(block)
    for group in range(8):
        scale, offset = block.lane(scales, group), block.lane(offsets, group)
        for first in range(0, 32, LANES):
            low = block.half_bytes(48 + 32 * (group // 2) + first, group % 2)
            high = block.masked(block.shifted(block.unsigned(16 + first), group - 4), 16)
            yield block.either(low, high), scale, offset


def _q6_k(block: _Block) -> Iterator[_Part]:
    (scale,) = block.halves(208, 1)
    scales = block.scales(block.signed(192, 16), scale)
    for group in range(16):
        scale = block.lane(scales, group)
        half, quarter = divmod(group // 2, 4)
        for first in range(16 * (group % 2), 16 * (group % 2) + 16, LANES):
            low = block.half_bytes(64 * half + 32 * (quarter % 2) + first, quarter // 2)
            high = block.shifted(block.unsigned(128 + 32 * half + first), 2 * quarter - 4)
            yield block.minus(block.either(low, block.masked(high, 48)), 32), scale, None


_TYPES: dict[str, Callable[[_Block], Iterator[_Part]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


@intrinsic
def unpack(_context, number, source, end, target, ahead):
    """In a kernel: unpack the blocks of the ggml type `number` at addresses [source, end), at least one, to the floats
    at `target`. Meanwhile the bytes `ahead` of them are prefetched into the cache.
    """

    def generate(_context, builder, _signature, arguments):
        number, source, end, target, ahead = arguments
        with cases(builder, number, _TYPES) as (before, done, names):
            for name in names:
                elements, size = block_size(name)
                body = builder.block
                at, out = builder.phi(_LONG), builder.phi(_LONG)
                _prefetch_block(builder, builder.add(at, ahead), size)
                for index, (integers, scale, offset) in enumerate(_TYPES[name](_Block(builder, at))):
                    weights = builder.fmul(_floats(builder, integers), scale, flags=_FUSED)
                    if offset is not None:
                        weights = builder.fadd(weights, offset, flags=_FUSED)
                    pointer = builder.inttoptr(builder.add(out, _LONG(4 * LANES * index)), _FLOATS.as_pointer())
                    builder.store(weights, pointer, align=4)
                for phi, first, step in ((at, source, size), (out, target, 4 * elements)):
                    phi.add_incoming(first, before)
                    phi.add_incoming(builder.add(phi, _LONG(step)), body)
                builder.cbranch(builder.icmp_unsigned("<", builder.add(at, _LONG(size)), end), body, done)

    return types.void(number, source, end, target, ahead), generate


@intrinsic
def dot_blocks(_context, number, source, row_bytes, rows, x, ahead):
    """In a kernel: the products of `WEIGHT_ROWS` rows of blocks of the ggml type `number` with the row of floats `x`,
    as a tuple. If there are fewer rows, the last one is repeated. Scales are applied to sums:

        sum over a group of (integer * scale + offset) * x  =  scale * sum(integer * x) + offset * sum(x)
    """

    signature = types.UniTuple(types.float32, WEIGHT_ROWS)(number, source, row_bytes, rows, x, ahead)

    def generate(context, builder, signature, arguments):
        number, source, row_bytes, rows, x, ahead = arguments
        results = [cgutils.alloca_once(builder, _FLOAT) for _ in range(WEIGHT_ROWS)]
        addresses = row_addresses(builder, source, rows, row_bytes, WEIGHT_ROWS)
        with cases(builder, number, _TYPES) as (before, done, names):
            for name in names:
                elements, size = block_size(name)
                body = builder.block
                at, x_at = builder.phi(_LONG), builder.phi(_LONG)
                sums = [builder.phi(_FLOATS) for _ in addresses]
                columns = [
                    load(builder, builder.add(x_at, _LONG(4 * first)), _FLOATS) for first in range(0, elements, LANES)
                ]
                added = []
                for running, address in zip(sums, addresses, strict=True):
                    position = builder.add(address, at)
                    _prefetch_block(builder, builder.add(position, ahead), size)
                    added.append(_add_block(builder, _TYPES[name](_Block(builder, position)), columns, running))
                following = builder.add(at, _LONG(size))
                for phi, first, last in (
                    (at, _LONG(0), following),
                    (x_at, x, builder.add(x_at, _LONG(4 * elements))),
                    *((phi, zero(_FLOATS), last) for phi, last in zip(sums, added, strict=True)),
                ):
                    phi.add_incoming(first, before)
                    phi.add_incoming(last, body)
                after = builder.append_basic_block()
                builder.cbranch(builder.icmp_unsigned("<", following, row_bytes), body, after)
                builder.position_at_end(after)
                for lanes, result in zip(added, results, strict=True):
                    builder.store(add_lanes(builder, lanes), result)
                builder.branch(done)
        return context.make_tuple(builder, signature.return_type, [builder.load(result) for result in results])

    return signature, generate


def _add_block(builder: ir.IRBuilder, parts: Iterator[_Part], columns: list[ir.Value], total: ir.Value) -> ir.Value:
    """`total` plus the products of a block with the columns of x."""
    for (scale, offset), group in groupby(zip(parts, columns, strict=True), key=lambda each: each[0][1:]):
        products, xs = None, None
        for (integers, *_), x in group:
            product = builder.fmul(_floats(builder, integers), x, flags=_FUSED)
            products = product if products is None else builder.fadd(products, product, flags=_FUSED)
            xs = x if xs is None else builder.fadd(xs, x)
        total = builder.fadd(total, builder.fmul(products, scale, flags=_FUSED), flags=_FUSED)
        if offset is not None:
            total = builder.fadd(total, builder.fmul(xs, offset, flags=_FUSED), flags=_FUSED)
    return total


@contextmanager
def cases(
    builder: ir.IRBuilder, number: ir.Value, names: Iterable[str]
) -> Iterator[tuple[ir.Block, ir.Block, Iterator[str]]]:
    """A branch for each of these types, at whose beginning the builder is: (the block before, the block after, the
    types).
    """
    before, done = builder.block, builder.append_basic_block("done")
    choice = builder.switch(number, done)

    def branches() -> Iterator[str]:
        for name in names:
            body = builder.append_basic_block(name)
            choice.add_case(ir.Constant(number.type, ggml_number(name)), body)
            builder.position_at_end(body)
            yield name

    yield before, done, branches()
    builder.position_at_end(done)


def _prefetch_block(builder: ir.IRBuilder, address: ir.Value, size: int) -> None:
    for line in range(0, size, _CACHE_LINE):
        prefetch(builder, builder.add(address, _LONG(line)))


def _floats(builder: ir.IRBuilder, integers: ir.Value) -> ir.Value:
    return builder.sitofp(integers, _FLOATS)
