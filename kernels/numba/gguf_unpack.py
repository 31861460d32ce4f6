"""Unpacks GGUF blocks (../gguf/blocks.py) in LLVM instructions: the integers of a block and its scales to float32.

    weight  =  integer * scale + offset

The results are those of the `gguf` library to the last bit: scales have 11 bits and 6 more for K-quants, integers up to
5, so products are exact wherever something is added to them, and one rounding remains.

A type is a generator that yields the weights of a block in their order, a register (`LANES`) at a time, so that the
same code is compiled for AVX-512, AVX2 and NEON. Formats are those of ggml's `ggml-common.h`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Callable, Iterator

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..gguf.blocks import block_size, ggml_number
from .dot_tile import LANES, prefetch

_LONG, _INT, _BYTE, _HALF, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.HalfType(), ir.FloatType()
_FUSED = ("contract",)
CACHE_LINE = 64


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

    def weights(self, integers: ir.Value, scale: ir.Value, offset: ir.Value | None = None) -> ir.Value:
        floats = self._builder.sitofp(integers, ir.VectorType(_FLOAT, LANES))
        product = self._builder.fmul(floats, scale, flags=_FUSED)
        return product if offset is None else self._builder.fadd(product, offset, flags=_FUSED)

    def _load(self, offset: int, item: ir.Type) -> ir.Value:
        address = self._builder.add(self._address, _LONG(offset))
        return self._builder.load(self._builder.inttoptr(address, item.as_pointer()), align=1)


def _filled(item: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(item, [value] * item.count)


def _nibbles(block: _Block, offset: int, size: int) -> Iterator[tuple[int, ir.Value]]:
    """The low halves of `size` bytes, then the high ones, with the number of the first."""
    for first in range(0, size, LANES):
        yield first, block.masked(block.unsigned(offset + first), 15)
    for first in range(0, size, LANES):
        yield size + first, block.shifted(block.unsigned(offset + first), 4)


def _q4_0(block: _Block) -> Iterator[ir.Value]:
    (scale,) = block.halves(0, 1)
    offset = block.times(scale, -8)
    for _, low in _nibbles(block, 2, 16):
        yield block.weights(low, scale, offset)


def _q4_1(block: _Block) -> Iterator[ir.Value]:
    scale, offset = block.halves(0, 2)
    for _, low in _nibbles(block, 4, 16):
        yield block.weights(low, scale, offset)


def _q5_0(block: _Block) -> Iterator[ir.Value]:
    (scale,) = block.halves(0, 1)
    offset = block.times(scale, -16)
    for first, low in _nibbles(block, 6, 16):
        yield block.weights(block.either(low, block.bits(2, first)), scale, offset)


def _q5_1(block: _Block) -> Iterator[ir.Value]:
    scale, offset = block.halves(0, 2)
    for first, low in _nibbles(block, 8, 16):
        yield block.weights(block.either(low, block.bits(4, first)), scale, offset)


def _q8_0(block: _Block) -> Iterator[ir.Value]:
    (scale,) = block.halves(0, 1)
    for first in range(0, 32, LANES):
        yield block.weights(block.signed(2 + first), scale)


def _k_scales(block: _Block) -> tuple[ir.Value, ir.Value]:
    """Scales and offsets of the eight groups of 32 weights of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    scale, least = block.halves(0, 2)
    low, low_offset, high = (block.unsigned(at, 4) for at in (4, 8, 12))
    highest = [block.masked(block.shifted(each, 2), 48) for each in (low, low_offset)]
    factors = block.joined(block.masked(low, 63), block.either(block.masked(high, 15), highest[0]))
    offsets = block.joined(block.masked(low_offset, 63), block.either(block.shifted(high, 4), highest[1]))
    return block.scales(factors, scale), block.scales(offsets, block.times(least, -1))


def _q4_k(block: _Block) -> Iterator[ir.Value]:
    scales, offsets = _k_scales(block)
    for pair in range(4):
        for first, low in _nibbles(block, 16 + 32 * pair, 32):
            group = 2 * pair + first // 32
            yield block.weights(low, block.lane(scales, group), block.lane(offsets, group))


def _q5_k(block: _Block) -> Iterator[ir.Value]:
    scales, offsets = _k_scales(block)
    for pair in range(4):
        for first, low in _nibbles(block, 48 + 32 * pair, 32):
            group = 2 * pair + first // 32
            high = block.masked(block.shifted(block.unsigned(16 + first % 32), group - 4), 16)
            yield block.weights(block.either(low, high), block.lane(scales, group), block.lane(offsets, group))


def _q6_k(block: _Block) -> Iterator[ir.Value]:
    (scale,) = block.halves(208, 1)
    scales = block.scales(block.signed(192, 16), scale)
    for half in range(2):
        for first, low in _nibbles(block, 64 * half, 64):
            high = block.shifted(block.unsigned(128 + 32 * half + first % 32), 2 * (first // 32) - 4)
            integers = block.minus(block.either(low, block.masked(high, 48)), 32)
            yield block.weights(integers, block.lane(scales, (128 * half + first) // 16))


_UNPACKERS: dict[str, Callable[[_Block], Iterator[ir.Value]]] = {
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
        done = builder.append_basic_block("unpacked")
        before = builder.block
        choice = builder.switch(number, done)
        for name, unpacker in _UNPACKERS.items():
            elements, size = block_size(name)
            body = builder.append_basic_block(name)
            choice.add_case(ir.Constant(number.type, ggml_number(name)), body)
            builder.position_at_end(body)
            at, out = builder.phi(_LONG), builder.phi(_LONG)
            for line in range(0, size, CACHE_LINE):
                prefetch(builder, builder.add(builder.add(at, ahead), _LONG(line)))
            for index, weights in enumerate(unpacker(_Block(builder, at))):
                pointer = builder.inttoptr(builder.add(out, _LONG(4 * LANES * index)), weights.type.as_pointer())
                builder.store(weights, pointer, align=4)
            following = builder.add(at, _LONG(size))
            for phi, first, step in ((at, source, size), (out, target, 4 * elements)):
                phi.add_incoming(first, before)
                phi.add_incoming(builder.add(phi, _LONG(step)), body)
            builder.cbranch(builder.icmp_unsigned("<", following, end), body, done)
        builder.position_at_end(done)

    return types.void(number, source, end, target, ahead), generate
