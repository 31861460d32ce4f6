// Linear layers with few rows of x: int4_linear.cu, fp8_linear.cu, plain_linear.cu, token_experts.cu.
//
// A block takes tiles of weight rows (products.cuh), one after the other. Its warps divide the steps of a tile among
// them; a warp copies several steps ahead into a ring in shared memory, also across tiles. Weights, where they are
// known, are read before the previous kernel has ended, x after it. At the end of a tile the sums of warps are added,
// always in the same order.
//
// Constants besides those of products.cuh: WARPS; STAGES of a ring; BIAS, 1 if there is one, 2 if results are
// rounded before it is added.

#pragma once

#include "linear/products.cuh"

namespace {

constexpr int kSums = 4 * OUTPUT_TILES * ROW_TILES;  // of a thread

// A thread stores a result: a part of what lane `lane` of all warps has summed up.
__device__ __forceinline__ void store_tile(
    Bits* out, const float (&all_sums)[WARPS][kSums][32], const Shape& shape, const Bits* bias, int number
) {
    const long long first = first_output(shape, number);
    const long long first_row = static_cast<long long>(number % shape.row_tiles) * kRows;
    const int lane = threadIdx.x % 32;
    for (int sum = threadIdx.x / 32; sum < kSums; sum += WARPS) {
        const int part = sum % 4, row_tile = sum / 4 % ROW_TILES, tile = sum / 4 / ROW_TILES;
        const long long row = first_row + 8 * row_tile + 2 * (lane % 4) + part % 2;
        const long long output = output_of(first, tile, part / 2, lane / 4);
        if (row >= shape.rows || output >= shape.out_size || (GATED && part >= 2)) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            total += all_sums[warp][sum][lane];
            if (GATED) up += all_sums[warp][sum + 2][lane];
        }
        if (BIAS) {
            if (BIAS == 2) total = rounded(total);
            total += to_float(bias[output]);
            if (GATED) up += to_float(bias[shape.out_size + output]);
        }
        out[row * shape.out_size + output] = to_bits(GATED ? swiglu(total, up) : total);
    }
}

// Compute `tiles` tiles; `store(number, sums)` stores the results of one.
template <class Weights, class Store>
__device__ __forceinline__ void multiply_tiles(
    const Weights& weights, const Shape& shape, int tiles, const Store& store
) {
    extern __shared__ __align__(16) char rings[];
    constexpr int kRingBytes = STAGES * Weights::kStageBytes;
    auto all_sums = reinterpret_cast<float(*)[WARPS][kSums][32]>(rings + WARPS * kRingBytes);  // two buffers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* ring = rings + warp * kRingBytes;

    // What is copied next: a tile, a step, and a stage of the ring.
    int ahead_tile = blockIdx.x, ahead_step = warp, ahead_stage = 0;
    const auto advance = [&](int& tile, int& step, int& stage) {
        step += WARPS;
        if (step - warp >= weights.steps) {  // all warps have as many turns; some have no step in the last one
            step = warp;
            tile += gridDim.x;
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
#pragma unroll 1
    for (int count = 0; count < STAGES - 1; ++count) {
        if (ahead_tile < tiles && ahead_step < weights.steps)
            weights.copy(ring + ahead_stage * Weights::kStageBytes, shape, ahead_tile, ahead_step, lane);
        commit();
        advance(ahead_tile, ahead_step, ahead_stage);
    }
    wait_for_previous();
    // The x of the next step is loaded ahead, as far as there are registers for it.
    constexpr bool kAhead = ROW_TILES == 1;
    int tile = blockIdx.x, step = warp, stage = 0;
    typename Weights::X x, next;
    if (kAhead && tile < tiles && step < weights.steps) weights.load(next, shape, tile, step, lane);
    Sums sums = {};
    int buffer = 0;
#pragma unroll 1
    while (tile < tiles) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();  // scales are copied by other lanes, and all have read the stage that is filled next
        if (ahead_tile < tiles && ahead_step < weights.steps)
            weights.copy(ring + ahead_stage * Weights::kStageBytes, shape, ahead_tile, ahead_step, lane);
        commit();
        advance(ahead_tile, ahead_step, ahead_stage);
        const int current = tile, current_step = step, current_stage = stage;
        advance(tile, step, stage);
        if (kAhead) {
            x = next;
            if (tile < tiles && step < weights.steps) weights.load(next, shape, tile, step, lane);
        }
        if (current_step < weights.steps) {
            if (!kAhead) weights.load(x, shape, current, current_step, lane);
            weights.add(sums, ring + current_stage * Weights::kStageBytes, x, lane);
        }
        if (tile == current) continue;
#pragma unroll
        for (int output = 0; output < OUTPUT_TILES; ++output)
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    all_sums[buffer][warp][(output * ROW_TILES + row) * 4 + part][lane] = sums[output][row][part];
                    sums[output][row][part] = 0.0f;
                }
        __syncthreads();
        store(current, all_sums[buffer]);
        buffer ^= 1;  // the other one has been read: before the __syncthreads above
    }
}

template <class Weights>
__device__ __forceinline__ void few_rows(const Weights& weights, const Shape& shape, const Bits* bias, Bits* out) {
    start_next();
    const int tiles = static_cast<int>((shape.out_size + kOutputs - 1) / kOutputs) * shape.row_tiles;
    multiply_tiles(weights, shape, tiles, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        store_tile(out, sums, shape, bias, number);
    });
}

}  // namespace
