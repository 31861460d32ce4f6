// Weights in NVFP4, for products.cuh, multiplied in the dtype of x; nvfp4.py has the layout. Products of values and
// their scales are exact in 16 bits. Constants: STEP, columns of a step, 256 or 128; WHOLE, 1 if x has whole steps.

#pragma once

#include "linear/products.cuh"

namespace {

constexpr int kParts = STEP / 128;  // 16-byte parts of a weight row that a thread has in a step
constexpr int kScales = STEP / 16;  // of a weight row and step; a thread has a quarter of them
#if STEP == 256
typedef unsigned OwnScales;
#else
typedef unsigned short OwnScales;
#endif
constexpr int kWeightBytes = OUTPUT_TILES * 16 * STEP / 2;
constexpr float kShift = 256.0f;  // values times scales are divided by this, so that they are in the range of float16

// Two adjacent columns, number PAIR of 4, of a word. The bits of E2M1 are at their places in a bfloat16 or float16, so
// this is the value times 2^-126 in bfloat16 and 2^-14 in float16, also for the subnormal 0.5.
template <int PAIR>
__device__ __forceinline__ unsigned two_values(unsigned word) {
    unsigned both;
    if constexpr (PAIR == 0)
        both = word & 0x81c081c0u;
    else if constexpr (PAIR == 1)
        both = word << 6 & 0x81c081c0u;
    else if constexpr (PAIR == 2)
        both = (word >> 4 | word << 28) & 0x81c081c0u;
    else
        both = (word << 2 & 0x80c080c0u) | (word >> 6 & 0x01000100u);
    return HALF ? (both & 0x80008000u) | (both & 0x01c001c0u) << 3 : both;
}

// The scale of 16 columns in both halves, from the bytes of up to four scales: times 2^118 in bfloat16 and 2^6 in
// float16. A byte of 0 is not 0 in bfloat16, but all values of its group are.
__device__ __forceinline__ unsigned scale_of(unsigned bytes, int number) {
#if HALF
    const unsigned two = (number % 2 ? bytes >> 1 : bytes << 7) & 0x7f807f80u;  // numbers 0 and 2, or 1 and 3
#else
    const unsigned two = ((number % 2 ? bytes >> 4 : bytes << 4) & 0x0ff00ff0u) | 0x70007000u;
#endif
    unsigned both;  // so written that the multiplication selects the half, without an instruction
    if (number < 2)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
            : "=r"(both) : "r"(two));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
            : "=r"(both) : "r"(two));
    return both;
}

__device__ __forceinline__ unsigned scaled(unsigned both, unsigned scale) {
    asm("fma.rn." ELEMENT "x2 %0, %0, %1, %2;" : "+r"(both) : "r"(scale), "r"(0x80008000u));
    return both;
}

struct Nvfp4 {
    static constexpr int kStageBytes = kWeightBytes + OUTPUT_TILES * 16 * kScales;  // weights, scales

    const unsigned char *packed, *scales;
    const float* factors;  // of rows
    long long row_bytes, scale_stride;
    int steps;

    typedef ScaledSource<unsigned char> Source;  // lanes below 16 copy the scales of a row each

    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        Source found = {{packed, shape, number, lane, row_bytes, lane % 4 * 16}};
        const long long first = first_output(shape, number);
        const int half = lane / 8 % 2;
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
            found.scales[tile] =
                kept(scales + weight_row(shape, output_of(first, tile, half, lane % 8), half) * kScales);
        return found;
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int step, int lane) const {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            source.rows.copy<16, kParts>(stage, tile, step * (STEP / 2), lane);
            if (lane < 16)
                copy_async<kScales>(
                    stage + lane * kScales + kWeightBytes + tile * 16 * kScales,
                    source.scales[tile] + step * static_cast<int>(scale_stride)
                );
        }
    }

    struct Inputs : XRows {
        int columns;
        float factors[OUTPUT_TILES][2];
    };
    typedef Columns<STEP, 16> X;

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        Inputs found = {{shape, number, lane}, static_cast<int>(shape.in_size)};
        const long long first = first_output(shape, number);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                found.factors[tile][half] =
                    factors[weight_row(shape, output_of(first, tile, half, lane / 4), half)] * kShift;
        return found;
    }

    // After the last column there is no x, and weights are 0.
    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int step, int lane) const {
        if (WHOLE) {
            x.load(inputs, step * STEP, lane);
            return;
        }
        const int own = step * STEP + lane % 4 * 16;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
            for (int word = 0; word < 4 * kParts; ++word) {
                const int column = own + word / 2 * 64;
                const auto* const from = reinterpret_cast<const uint4*>(inputs.rows[tile] + column) + word % 2;
                x.of_words[tile][word] = column < inputs.columns ? *from : uint4{};
            }
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& columns, int lane) const {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            const char* of_scales = stage + kWeightBytes + tile * 16 * kScales;
            const unsigned scales[2] = {
                reinterpret_cast<const OwnScales*>(of_scales)[lane],
                reinterpret_cast<const OwnScales*>(of_scales + 8 * kScales)[lane]
            };
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const char* own = stage + (tile * 2 * kParts + part) * 32 * 16 + lane * 16;
                const uint4 lower = *reinterpret_cast<const uint4*>(own);
                const uint4 upper = *reinterpret_cast<const uint4*>(own + kParts * 32 * 16);
                const unsigned words[4][2] = {
                    {lower.x, upper.x}, {lower.y, upper.y}, {lower.z, upper.z}, {lower.w, upper.w}
                };
#pragma unroll
                for (int word = 0; word < 4; ++word) {
                    unsigned a[2][4];  // of two products
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const unsigned scale = scale_of(scales[half], 2 * part + word / 2);
                        a[0][half] = scaled(two_values<0>(words[word][half]), scale);
                        a[0][2 + half] = scaled(two_values<1>(words[word][half]), scale);
                        a[1][half] = scaled(two_values<2>(words[word][half]), scale);
                        a[1][2 + half] = scaled(two_values<3>(words[word][half]), scale);
                    }
#pragma unroll
                    for (int row = 0; row < ROW_TILES; ++row) {
                        const uint4 x = columns.of_words[row][4 * part + word];
                        multiply(sums[tile][row], a[0], x.x, x.y);
                        multiply(sums[tile][row], a[1], x.z, x.w);
                    }
                }
            }
        }
    }
};

// Multiplies the sums of a tile by the factors of its rows.
__device__ __forceinline__ void finish(const Nvfp4&, Sums& sums, const Nvfp4::Inputs& inputs) {
#pragma unroll
    for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
        for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
            for (int part = 0; part < 2 * kPerHalf; ++part)
                sums[tile][row][part] *= inputs.factors[tile][part / kPerHalf];
}

}  // namespace
