// Copies weights in 4 bits to shared memory, for format.cuh and byte_format.cuh; group_format.py has the layout. A step
// has a pair of groups. Constant: GROUP columns of a group.

#pragma once

#include "linear/products.cuh"

namespace {

constexpr int kWords = GROUP / 16;              // 4-byte words of a weight row that a thread has in a step
constexpr int kLoad = kWords < 4 ? kWords : 4;  // words of one copy
constexpr int kWeightBytes = OUTPUT_TILES * 2 * kWords * 4 * 32;

struct PackedGroups {
    static constexpr int kStageBytes = kWeightBytes + OUTPUT_TILES * 8 * 16;  // weights; scales and zeros

    const unsigned char* packed;
    const Bits *scales, *zeros;
    long long row_bytes, group_stride;
    unsigned matrix_bytes, matrix_scales;  // of an expert
    int steps;

    typedef ScaledSource<Bits> Source;  // scales or zeros; lanes below 8 copy them

    // Lane (zeros * 2 + group) * 2 + half copies 8 adjacent scales or zeros.
    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        Source found = {{packed, shape, number, lane, row_bytes, lane % 4 * 4 * kLoad}};
        const long long first = first_output(shape, number);
        const int half = lane % 2, group = lane / 2 % 2;
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            const long long row = weight_row(shape, output_of(first, tile, half, 0), half);
            found.scales[tile] = kept((lane < 4 ? scales : zeros) + group * group_stride + row);
        }
        return found;
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int pair, int lane) const {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
            source.rows.copy<4 * kLoad, kWords / kLoad>(stage, tile, pair * GROUP, lane);
            if (lane < 8)
                copy_async<16>(
                    stage + lane * 16 + kWeightBytes + tile * 8 * 16,
                    source.scales[tile] + 2 * pair * static_cast<int>(group_stride)
                );
        }
    }
};

}  // namespace
