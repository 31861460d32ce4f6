// Weights in fp8 (e4m3), for products.cuh; fp8_format.py has the layout. A step has a block of 128 columns, whose
// sums are scaled in float32.

#pragma once

#include "linear/products.cuh"

namespace {

constexpr int kBlock = 128, kWords = kBlock / 16;  // 4-byte words of a weight row that a thread has in a block
constexpr int kWeightBytes = OUTPUT_TILES * 16 * kBlock;

// Converts the fp8 numbers in bytes FIRST and FIRST + 1 of `values` to two float16 or bfloat16, without rounding.
template <int FIRST>
__device__ __forceinline__ unsigned two_weights(unsigned values) {
    unsigned both;
#if HALF
    const unsigned short bytes = static_cast<unsigned short>(FIRST ? values >> 16 : values);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(bytes));
#else
    // prmt moves each byte to the upper byte of a 16-bit half; the shift moves exponent and mantissa to their places in
    // a bfloat16. Its exponent bias is 127, that of e4m3 is 7, so the fma multiplies by 2^120. NaN, which no checkpoint
    // has, becomes 480.
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(values), "n"(FIRST ? 0x3424 : 0x1404));
    both = (both & 0x80008000u) | (both >> 4 & 0x07f007f0u);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(both) : "r"(0x7b807b80u), "r"(0x80008000u));
#endif
    return both;
}

struct Fp8Matrix {
    static constexpr int kStageBytes = kWeightBytes + OUTPUT_TILES * 16 * 4;  // weights, scales

    const unsigned char* values;
    const float* scales;
    long long row_group, scale_stride, scale_step;  // `scale_step` is 0 if a row has one scale
    unsigned matrix_bytes, matrix_scales;           // of an expert
    int steps;

    typedef ScaledSource<float> Source;  // lanes below 16 copy scales

    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        Source found = {{values, shape, number, lane, shape.in_size, lane % 4 * 16}};
        const long long first = first_output(shape, number);
        const int half = lane / 8 % 2;
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            const long long row = weight_row(shape, output_of(first, tile, half, lane % 8), half);
            found.scales[tile] = kept(scales + row / row_group * scale_stride);
        }
        return found;
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int block, int lane) const {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            source.rows.copy<16, kWords / 4>(stage, tile, block * kBlock, lane);
            if (lane < 16)
                copy_async<4>(
                    stage + lane * 4 + kWeightBytes + tile * 16 * 4,
                    source.scales[tile] + block * static_cast<int>(scale_step)
                );
        }
    }

    typedef XRows Inputs;
    typedef Columns<kBlock, 16> X;

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        return {shape, number, lane};
    }

    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int block, int lane) const {
        x.load(inputs, block * kBlock, lane);
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& columns, int lane) const {
        const float* own = reinterpret_cast<const float*>(stage + kWeightBytes) + lane / 4;
        Sums parts = {};
#pragma unroll
        for (int word = 0; word < kWords; word += 2) {
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                unsigned a[2][4];  // of two words
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int before = ((tile * 2 + half) * kWords + word / 4 * 4) * 32;  // words
                    const uint2 bytes = *reinterpret_cast<const uint2*>(stage + (before + lane * 4 + word % 4) * 4);
                    a[0][half] = two_weights<0>(bytes.x);
                    a[0][2 + half] = two_weights<2>(bytes.x);
                    a[1][half] = two_weights<0>(bytes.y);
                    a[1][2 + half] = two_weights<2>(bytes.y);
                }
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) {
                    const uint4 x = columns.of_words[row][word / 2];
                    multiply(parts[tile][row], a[0], x.x, x.y);
                    multiply(parts[tile][row], a[1], x.z, x.w);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
            add_scaled(sums[tile], parts[tile], own[tile * 16], own[tile * 16 + 8]);
    }
};

}  // namespace
