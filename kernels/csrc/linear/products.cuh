// Products of weights in any format with few rows of x, for few_rows.cuh.
//
// A product is one mma instruction: 16 weight rows x 16 columns x 8 rows of x, with both operands in registers. Its
// columns may come in any order that is the same for both operands, so a thread reads adjacent bytes of a weight row
// and the same columns of x. A tile has 16 * OUTPUT_TILES weight rows; its steps are ranges of columns.
//
// Constants: OUTPUT_TILES; ROW_TILES of X_ROWS rows of x each (8, or 4 if a row of x takes two rows of a product);
// GATED, 1 if the lower 8 weight rows of a product belong to the gate and the upper 8 to up; HALF, 1 for float16, 0 for
// bfloat16.
//
// A format (plain_format.cuh, fp8_format.cuh, packed4/*format.cuh, nvfp4/nvfp4_format.cuh) is a struct with these members:
//     kStageBytes                                   bytes of a step in the ring of a warp
//     steps                                         number of steps of a row
//     Source; source(shape, number, lane)           the addresses of a thread's weights in tile `number`;
//                                                   source.to_expert(weights, expert) moves them to an expert's matrix
//     copy(stage, source, step, lane)               starts to copy the weights of a step to the address `stage`
//     Inputs; inputs(shape, number, lane)           the addresses of a thread's x in a tile;
//                                                   inputs.move(rows, shape.in_size) moves them by `rows` rows
//     X; load(x, inputs, step, lane)                loads the x of a step
//     add(sums, stage, x, lane)                     adds the products of a step
//
// A step takes few instructions: what depends only on the tile, and all divisions, are computed in `source` and
// `inputs`. If a format has a function `prepare(weights, shape, rows)`, each block calls it once, when x is available. If
// it has a function `finish(weights, sums, inputs)`, each thread calls it at the end of a tile.

#pragma once

#include "linear/mma.cuh"

namespace {

constexpr int kPerHalf = X_ROWS / 4;  // results of a thread in 8 weight rows and a row tile
typedef float Sums[OUTPUT_TILES][ROW_TILES][2 * kPerHalf];  // of a thread, in the layout of mma results
constexpr int kSums = 2 * kPerHalf * OUTPUT_TILES * ROW_TILES;

constexpr int kOutputs = (GATED ? 8 : 16) * OUTPUT_TILES;  // results of a tile for each row of x
constexpr int kRows = X_ROWS * ROW_TILES;

// Copies to an address in shared memory. It has no L2 cache policy, because NVRTC 13.0 miscompiles one here.
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

// The weight row of result `output`. In a gated tile, half 0 has rows of the gate and half 1 rows of up.
__device__ __forceinline__ long long weight_row(const Shape& shape, long long output, int half) {
    if (output >= shape.out_size) output = 0;  // its result is not stored
    return GATED && half ? shape.out_size + output : output;
}

__device__ __forceinline__ long long output_of(long long first, int tile, int half, int quad) {
    return first + quad + (GATED ? 8 * tile : 16 * tile + 8 * half);
}

__device__ __forceinline__ long long first_output(const Shape& shape, int number) {
    return static_cast<long long>(shape.row_tiles.quotient(number)) * kOutputs;
}

// Keeps the compiler from computing a pointer to global memory again in every step.
template <typename T>
__device__ __forceinline__ T* kept(T* pointer) {
    unsigned long long address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
}

// The addresses of a thread's weight rows in a tile.
struct WeightRows {
    const char* starts[OUTPUT_TILES][2];

    // A row has `row_bytes` bytes; the thread's part begins `offset` bytes after the start of the row.
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

    // Copies the weights that this thread multiplies: COUNT parts of BYTES bytes from each row, the first of them
    // `offset` bytes after `starts`. The 4 threads that share a row copy adjacent parts.
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

    // Moves all addresses by `bytes`, to the matrix of another expert.
    __device__ __forceinline__ void move(unsigned long long bytes) {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) starts[tile][half] += bytes;
    }
};

// For formats that need no preparation; byte_format.cuh has an overload.
template <class Weights>
__device__ __forceinline__ void prepare(const Weights&, const Shape&, int) {}

// For formats whose sums are complete; nvfp4_format.cuh has an overload.
template <class Weights>
__device__ __forceinline__ void finish(const Weights&, Sums&, const typename Weights::Inputs&) {}

// The addresses of weights and scales, for formats with the members `matrix_bytes` and `matrix_scales`.
template <typename Scale>
struct ScaledSource {
    WeightRows rows;
    const Scale* scales[OUTPUT_TILES];  // used by the threads that copy scales

    template <class Weights>
    __device__ __forceinline__ void to_expert(const Weights& weights, int expert) {
        rows.move(static_cast<unsigned long long>(expert) * weights.matrix_bytes);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
            scales[tile] += static_cast<unsigned long long>(expert) * weights.matrix_scales;
    }
};

// The addresses of a thread's rows of x.
struct XRows {
    const Bits* rows[ROW_TILES];

    __device__ __forceinline__ XRows(const Shape& shape, int number, int lane) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            const long long row = static_cast<long long>(shape.row_tiles.rest(number)) * kRows + 8 * tile + lane / 4;
            // rows after the last one read the last one; their results are not stored
            const Bits* const start = shape.x + min(row, shape.rows - 1) * shape.in_size;
            rows[tile] = ROW_TILES == 1 ? kept(start) : start;  // with more, all of x would be kept in registers
        }
    }

    // Moves all addresses by `count` rows.
    __device__ __forceinline__ void move(int count, long long in_size) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) rows[tile] += count * in_size;
    }
};

// Adds the scaled sums of a group. A thread has one of the lower 8 weight rows of a tile and one of the upper 8, each
// with its own scale.
__device__ __forceinline__ void add_scaled(
    float (&sums)[ROW_TILES][2 * kPerHalf], const float (&parts)[ROW_TILES][2 * kPerHalf], float lower, float upper
) {
#pragma unroll
    for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
        for (int part = 0; part < 2 * kPerHalf; ++part)
            sums[row][part] += parts[row][part] * (part < kPerHalf ? lower : upper);
}

// The columns of a group that a thread loads: words of 4 columns, in runs of RUN adjacent columns. The 4 threads that
// share a row of x load adjacent runs.
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
