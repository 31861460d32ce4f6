// Products of fp8 weights with few rows of x in float16, for Hopper: expert_tiles.cu, fp8_at_once.cu.
//
// One instruction converts two fp8 to float16, so products are computed in float16. x in bfloat16 is converted too,
// after it is divided by a power of two per row and group of columns. This keeps all bits of a bfloat16; only numbers
// below 2^-31 of the largest in the group lose some. Products are exact, and added in float32.
//
// A product is one mma instruction: 16 weight rows x 16 columns x 8 rows of x. Its columns may come in any order that
// is the same for both operands, so a thread loads 16 adjacent columns of every 64.
//
// Constants: HALF, 1 if x is float16, 0 if it is bfloat16.

#pragma once

#include "hopper.cuh"
#include "linear/elements.cuh"
#include "warps.cuh"

namespace {

constexpr int kBlock = 128;  // columns of weights that share a scale
constexpr unsigned kAll = 0xffffffffu;

// A thread holds the results of weight rows `quad` and `quad` + 8 and of rows 2 * `part` and 2 * `part` + 1 of x. It
// loads these two weight rows, but row `quad` of x.
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int part() { return lane() % 4; }

// Two of four fp8 as float16.
template <int FIRST>
__device__ __forceinline__ unsigned two_weights(unsigned bytes) {
    unsigned both;
    const unsigned short pair = static_cast<unsigned short>(FIRST ? bytes >> 16 : bytes);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(pair));
    return both;
}

__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// COLUMNS columns of the row of x that a thread loads: 16 adjacent columns of every 64, as in `Weights`.
template <int COLUMNS>
struct Row {
    static constexpr int kWords = COLUMNS / 32;
    uint4 words[kWords];
    float factor;  // `convert` divides the numbers by it

    // Columns from `columns` on, a multiple of 128, become zeros.
    __device__ __forceinline__ void load(const Bits* x, int columns = COLUMNS) {
        const uint4* const own = reinterpret_cast<const uint4*>(x) + part() * 2;
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            words[i] = i / 4 * kBlock < columns ? own[i / 2 * 8 + i % 2] : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void convert() {
#if HALF
        factor = 1.0f;
#else
        unsigned most = 0;  // largest absolute values, in two halves
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const unsigned pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) most = __vmaxu2(most, pairs[j] & 0x7fff7fffu);
        }
        most = max(most >> 16, most & 0xffffu);
        most = max(most, __shfl_xor_sync(kAll, most, 1));
        most = max(most, __shfl_xor_sync(kAll, most, 2));
        const unsigned exponent = min(max(most >> 7, 15u), 254u);
        factor = __uint_as_float((exponent - 14) << 23);
        const float inverse = __uint_as_float((268 - exponent) << 23);
        const auto converted = [&](unsigned pair) {
            unsigned word;
            const float low = __uint_as_float(pair << 16) * inverse;
            const float high = __uint_as_float(pair & 0xffff0000u) * inverse;
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
            return word;
        };
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            words[i] = {converted(words[i].x), converted(words[i].y), converted(words[i].z), converted(words[i].w)};
#endif
    }

    // The factor of result 0 or 1 of a product, from another thread: this one has loaded another row of x.
    __device__ __forceinline__ float factor_of_result(int number) const {
        return __shfl_sync(kAll, factor, 8 * part() + 4 * number);
    }
};

// 64 columns of 16 weight rows, as operands of four products.
struct Weights {
    unsigned operands[4][4];

    // From a thread's 16 columns of row `quad` and of row `quad` + 8.
    __device__ __forceinline__ void load(const unsigned char* lower, const unsigned char* upper) {
        const uint4 below = *reinterpret_cast<const uint4*>(lower), above = *reinterpret_cast<const uint4*>(upper);
        const unsigned rows[4][2] = {{below.x, above.x}, {below.y, above.y}, {below.z, above.z}, {below.w, above.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            operands[i][0] = two_weights<0>(rows[i][0]);
            operands[i][1] = two_weights<0>(rows[i][1]);
            operands[i][2] = two_weights<2>(rows[i][0]);
            operands[i][3] = two_weights<2>(rows[i][1]);
        }
    }
};

// Add the products of 64 columns, which begin at 64 * `number` in x.
template <int COLUMNS>
__device__ __forceinline__ void add_products(
    float (&sums)[4], const Weights& weights, const Row<COLUMNS>& x, int number
) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4& word = x.words[2 * number + i / 2];
        multiply(sums, weights.operands[i], i % 2 ? word.z : word.x, i % 2 ? word.w : word.y);
    }
}

}  // namespace
