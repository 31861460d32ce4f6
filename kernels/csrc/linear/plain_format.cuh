// Weights in 16 bits, for products.cuh. A step has 64 columns.

#pragma once

#include "linear/products.cuh"

namespace {

constexpr int kColumns = 64, kRun = 8;     // columns of a step; adjacent columns of a thread (16 bytes)
constexpr int kRuns = kColumns / 4 / kRun;  // runs of a thread in a weight row and step

struct Plain {
    static constexpr int kStageBytes = OUTPUT_TILES * 16 * kColumns * 2;

    const Bits* values;
    unsigned matrix_bytes;  // of an expert
    int steps;

    struct Source {
        WeightRows rows;

        __device__ __forceinline__ void to_expert(const Plain& weights, int expert) {
            rows.move(static_cast<unsigned long long>(expert) * weights.matrix_bytes);
        }
    };

    __device__ __forceinline__ Source source(const Shape& shape, int number, int lane) const {
        return {{values, shape, number, lane, shape.in_size * 2, lane % 4 * kRun * 2}};
    }

    __device__ __forceinline__ void copy(unsigned stage, const Source& source, int step, int lane) const {
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; ++tile)
            source.rows.copy<16, kRuns>(stage, tile, step * (kColumns * 2), lane);
    }

    typedef XRows Inputs;
    typedef Columns<kColumns, kRun> X;

    __device__ __forceinline__ Inputs inputs(const Shape& shape, int number, int lane) const {
        return {shape, number, lane};
    }

    __device__ __forceinline__ void load(X& x, const Inputs& inputs, int step, int lane) const {
        x.load(inputs, step * kColumns, lane);
    }

    __device__ __forceinline__ void add(Sums& sums, const char* stage, const X& columns, int lane) const {
#pragma unroll
        for (int run = 0; run < kRuns; ++run)
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; ++tile) {
                const char* own = stage + (tile * 2 * kRuns + run) * 32 * 16 + lane * 16;
                const uint4 lower = *reinterpret_cast<const uint4*>(own);
                const uint4 upper = *reinterpret_cast<const uint4*>(own + kRuns * 32 * 16);
                const unsigned a[2][4] = {{lower.x, upper.x, lower.y, upper.y}, {lower.z, upper.z, lower.w, upper.w}};
#pragma unroll
                for (int row = 0; row < ROW_TILES; ++row) {
                    const uint4 x = columns.of_words[row][run];
                    multiply(sums[tile][row], a[0], x.x, x.y);
                    multiply(sums[tile][row], a[1], x.z, x.w);
                }
            }
    }
};

}  // namespace
