// Products of weights in any format with few rows of x, for few_rows.cuh.
//
// A product (16 weight rows x 16 columns x 8 rows of x) takes both operands from registers. The order of its columns is
// free, as long as both operands have the same: so a thread reads adjacent bytes of a weight row, and the x of the same
// columns. A tile has 16 * OUTPUT_TILES weight rows; its steps are ranges of columns.
//
// Constants: OUTPUT_TILES; ROW_TILES of X_ROWS rows of x each, which is 8, or 4 where a row of x takes two rows of a
// product; GATED, 1 if the lower 8 weight rows of a product are of the gate and the upper 8 of up; HALF, 1 for float16,
// 0 for bfloat16.
//
// A format (plain_format.cuh, fp8_format.cuh, int4/*format.cuh) is a struct with these members:
//     kStageBytes                                   of a step in the ring of a warp
//     steps                                         of a row
//     Source; source(shape, number, lane)           where a thread finds the weights of tile `number`;
//                                                   source.to_expert(weights, expert): in the matrix of an expert
//     copy(stage, source, step, lane)               copy the weights of a step, asynchronously, to that address
//     Inputs; inputs(shape, number, lane)           where it finds the x of a tile; inputs.move(rows, shape.in_size)
//     X; load(x, inputs, step, lane)                load the x of a step
//     add(sums, stage, x, lane)                     add the products of a step
//
// A step is short: what its tile determines, and all divisions, are in `source` and `inputs`. If a format has a
// function `prepare(weights, shape, rows)`, a block calls it once, when x is there.

#pragma once

#include "linear/mma.cuh"

namespace {

constexpr int kPerHalf = X_ROWS / 4;  // results of a thread in 8 weight rows and a row tile
typedef float Sums[OUTPUT_TILES][ROW_TILES][2 * kPerHalf];  // of a thread, as products have them
constexpr int kSums = 2 * kPerHalf * OUTPUT_TILES * ROW_TILES;

constexpr int kOutputs = (GATED ? 8 : 16) * OUTPUT_TILES;  // results of a tile for each row of x
constexpr int kRows = X_ROWS * ROW_TILES;

// To an address in shared memory. Without a policy for the L2 cache: NVRTC 13.0 compiles that wrongly here.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Divides by a multiplication; exact for numbers below 2^31 / value.
struct Divisor {
    int value;
    unsigned inverse;  // 2^31 / value, rounded up

    __device__ __forceinline__ explicit Divisor(int value)
        : value(value), inverse((0x80000000u + value - 1) / static_cast<unsigned>(value)) {}

    __device__ __forceinline__ int quotient(int number) const { return __umulhi(2 * number, inverse); }
    __device__ __forceinline__ int rest(int number) const { return number - quotient(number) * value; }
};

struct Shape {
    const Bits* x;
    long long rows, out_size, in_size;
    Divisor row_tiles;

    __device__ __forceinline__ Shape(const Bits* x, long long rows, long long out_size, long long in_size)
        : x(x), rows(rows), out_size(out_size), in_size(in_size),
          row_tiles(static_cast<int>((rows + kRows - 1) / kRows)) {}
};

// The weight row of result `output`: of the gate or of up, in half 0 or 1 of a gated tile.
__device__ __forceinline__ long long weight_row(const Shape& shape, long long output, int half) {
    if (output >= shape.out_size) output = 0;  // not stored
    return GATED && half ? shape.out_size + output : output;
}

__device__ __forceinline__ long long output_of(long long first, int tile, int half, int quad) {
    return first + quad + (GATED ? 8 * tile : 16 * tile + 8 * half);
}

__device__ __forceinline__ long long first_output(const Shape& shape, int number) {
    return static_cast<long long>(shape.row_tiles.quotient(number)) * kOutputs;
}

// A pointer to global memory that the compiler does not compute again in every step.
template <typename T>
__device__ __forceinline__ T* kept(T* pointer) {
    unsigned long long address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
}

// Where the weight rows of a thread begin, in a tile.
struct WeightRows {
    const char* starts[OUTPUT_TILES][2];

    // Rows have `row_bytes`; the part of a thread begins `offset` bytes after that.
    __device__ __forceinline__ WeightRows(
        const void* matrix, const Shape& shape, int number, int lane, long long row_bytes, int offset
    ) {
        const long long first = first_output(shape, number);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long row = weight_row(shape, output_of(first, tile, half, lane / 4), half);
                starts[tile][half] = kept(static_cast<const char*>(matrix) + row * row_bytes + offset);
            }
    }

    // Copy the weights that this thread multiplies, from `offset` bytes after the starts of its rows on: COUNT parts of
    // BYTES of each row, next to those of the other 3 threads that have it.
    template <int BYTES, int COUNT>
    __device__ __forceinline__ void copy(unsigned stage, int tile, int offset, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* own = starts[tile][half] + offset;
#pragma unroll
            for (int part = 0; part < COUNT; ++part)
                copy_async<BYTES>(
                    stage + lane * BYTES + ((tile * 2 + half) * COUNT + part) * 32 * BYTES, own + part * 4 * BYTES
                );
        }
    }

    // So many bytes further: in the matrix of another expert.
    __device__ __forceinline__ void move(unsigned long long bytes) {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) starts[tile][half] += bytes;
    }
};

// For formats that need no preparation; byte_format.cuh has another one.
template <class Weights>
__device__ __forceinline__ void prepare(const Weights&, const Shape&, int) {}

// Where weights with scales begin, for formats whose matrices have `matrix_bytes` and `matrix_scales`.
template <typename Scale>
struct ScaledSource {
    WeightRows rows;
    const Scale* scales[OUTPUT_TILES];  // that a thread copies, if it does

    template <class Weights>
    __device__ __forceinline__ void to_expert(const Weights& weights, int expert) {
        rows.move(static_cast<unsigned long long>(expert) * weights.matrix_bytes);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
            scales[tile] += static_cast<unsigned long long>(expert) * weights.matrix_scales;
    }
};

// Where the rows of x of a thread begin.
struct XRows {
    const Bits* rows[ROW_TILES];

    __device__ __forceinline__ XRows(const Shape& shape, int number, int lane) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const long long row = static_cast<long long>(shape.row_tiles.rest(number)) * kRows + 8 * tile + lane / 4;
            // instead of a row that does not exist, the last one: its results are not stored
            const Bits* const start = shape.x + min(row, shape.rows - 1) * shape.in_size;
            rows[tile] = ROW_TILES == 1 ? kept(start) : start;  // with more, all of x would be kept in registers
        }
    }

    // So many rows further.
    __device__ __forceinline__ void move(int count, long long in_size) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) rows[tile] += count * in_size;
    }
};

// Add the sums of a group; a thread has one row of the lower 8 of a tile and one of the upper 8, each with its scale.
__device__ __forceinline__ void add_scaled(
    float (&sums)[ROW_TILES][2 * kPerHalf], const float (&parts)[ROW_TILES][2 * kPerHalf], float lower, float upper
) {
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
        for (int part = 0; part < 2 * kPerHalf; ++part)
            sums[row][part] += parts[row][part] * (part < kPerHalf ? lower : upper);
}

// A thread's columns of a group: words of 4, in runs of RUN adjacent columns. The 4 threads that share a row of x have
// runs next to each other.
template <int COLUMNS, int RUN>
struct Columns {
    static constexpr int kWords = COLUMNS / 16;
    uint4 of_words[ROW_TILES][kWords / 2];

    __device__ __forceinline__ void load(const XRows& inputs, int first, int lane) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const Bits* x = inputs.rows[tile] + (first + lane % 4 * RUN);
#pragma unroll
            for (int word = 0; word < kWords; word += 2)
                of_words[tile][word / 2] =
                    *reinterpret_cast<const uint4*>(x + word / (RUN / 4) * 4 * RUN + word % (RUN / 4) * 4);
        }
    }
};

}  // namespace
