// Weights in 4 bits, for products.cuh, multiplied in the dtype of x; group_format.py has the layout. The sums of a
// group are scaled in float32. Constant: GROUP columns of a group.

#pragma once

#include "packed4/copy.cuh"

namespace {

// The number 128 in bfloat16, 1024 in float16. With a 4-bit value in its low byte, it is this number plus the value.
constexpr unsigned kOffset = HALF ? 0x6400u : 0x4300u;
constexpr unsigned kOne = HALF ? 0x3c003c00u : 0x3f803f80u;

// Converts the 4-bit values in bytes FIRST and FIRST + 1 of `values`, and subtracts the zero point: both halves of
// `negated` are -(offset + zero point).
template <int FIRST>
__device__ __forceinline__ unsigned two_weights(unsigned values, unsigned negated) {
    unsigned both;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(both) : "r"(values), "r"(kOffset >> 8), "n"(FIRST ? 0x4342 : 0x4140));
    asm("fma.rn." ELEMENT "x2 %0, %0, %1, %2;" : "+r"(both) : "r"(kOne), "r"(negated));
    return both;
}

struct GroupScaled : PackedGroups {
    struct Inputs : XRows {
        int columns;
    };

    struct X {
        Columns<GROUP, 4 * kLoad> groups[2];
    };

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        return {{shape, number, lane}, static_cast<int>(shape.in_size)};
    }

    // After the last group there is no x, and scales are 0.
    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int pair, int lane) const {
        const int first = 2 * pair * GROUP;
        x.groups[0].load(inputs, first, lane);
        if (first + GROUP < inputs.columns)
            x.groups[1].load(inputs, first + GROUP, lane);
        else
            x.groups[1] = {};
    }

    // Group 0 is in the low halves of the bytes, group 1 in the high halves.
    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& x, int lane) const {
        const Bits* own = reinterpret_cast<const Bits*>(stage + kWeightBytes) + lane / 4;
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            Sums parts = {};
            unsigned negated[OUTPUT_TILES][2];
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Bits zero = own[(tile * 8 + 4 + group * 2 + half) * 8];
                    negated[tile][half] = (0x8000u | kOffset | static_cast<unsigned>(to_float(zero))) * 0x10001u;
                }
#pragma unroll
            for (int word = 0; word < kWords; word += 2) {
#pragma unroll
                for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                    unsigned a[2][4];  // of two words
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int before = ((tile * 2 + half) * kWords + word / kLoad * kLoad) * 32;  // words
                        const uint2 bytes =
                            *reinterpret_cast<const uint2*>(stage + (before + lane * kLoad + word % kLoad) * 4);
                        const unsigned low = bytes.x >> (4 * group) & 0x0f0f0f0fu;
                        const unsigned high = bytes.y >> (4 * group) & 0x0f0f0f0fu;
                        a[0][half] = two_weights<0>(low, negated[tile][half]);
                        a[0][2 + half] = two_weights<2>(low, negated[tile][half]);
                        a[1][half] = two_weights<0>(high, negated[tile][half]);
                        a[1][2 + half] = two_weights<2>(high, negated[tile][half]);
                    }
#pragma unroll
                    for (int row = 0; row < ROW_TILES; ++row) {
                        const uint4 columns = x.groups[group].of_words[row][word / 2];
                        multiply(parts[tile][row], a[0], columns.x, columns.y);
                        multiply(parts[tile][row], a[1], columns.z, columns.w);
                    }
                }
            }
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile)
                add_scaled(
                    sums[tile], parts[tile], to_float(own[(tile * 8 + group * 2) * 8]),
                    to_float(own[(tile * 8 + group * 2 + 1) * 8])
                );
        }
    }
};

}  // namespace
