// Linear layers with few rows of x: int4_linear.cu, nvfp4_linear.cu, fp8_linear.cu, plain_linear.cu,
// token_experts.cu.
//
// A thread block processes tiles of weight rows (products.cuh) one after another. Its warps divide the steps of a tile.
// Each warp prefetches several steps, also those of later tiles, into its own ring in shared memory. Weights are copied
// before the previous kernel has ended, unless that kernel selects them; x is read after it. At the end of a tile the
// sums of the warps are added in a fixed order.
//
// Constants besides those of products.cuh: WARPS; STAGES of a ring; BIAS, 0 without a bias, 1 with one, 2 if results
// are rounded before it is added.

#pragma once

#include "linear/products.cuh"

namespace {

// Adds the sums of all warps, and stores the results of a tile: a thread adds what the same lane of each warp has.
__device__ __forceinline__ void store_tile(
    Bits* out, const float (&all_sums)[WARPS][kSums][32], const Shape& shape, const Bits* bias, int number
) {
    const long long first = first_output(shape, number);
    const long long first_row = static_cast<long long>(shape.row_tiles.rest(number)) * kRows;
    const int lane = threadIdx.x % 32;
    for (int sum = threadIdx.x / 32; sum < kSums; sum += WARPS) {
        constexpr int kParts = 2 * kPerHalf;
        const int part = sum % kParts, row_tile = sum / kParts % ROW_TILES, tile = sum / kParts / ROW_TILES;
        const int half = part / kPerHalf;
        const long long row = first_row + X_ROWS * row_tile + kPerHalf * (lane % 4) + part % kPerHalf;
        const long long output = output_of(first, tile, half, lane / 4);
        if (row >= shape.rows || output >= shape.out_size || (GATED && half)) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            total += all_sums[warp][sum][lane];
            if (GATED) up += all_sums[warp][sum + kPerHalf][lane];
        }
        if (BIAS) {
            if (BIAS == 2) total = rounded(total);
            total += to_float(bias[output]);
            if (GATED) up += to_float(bias[shape.out_size + output]);
        }
        out[row * shape.out_size + output] = to_bits(GATED ? swiglu(total, up) : total);
    }
}

// Computes `tiles` tiles; `begin()` is called when x is available, and `store(number, sums)` stores the results of a
// tile.
template <class Weights, class Begin, class Store>
__device__ __forceinline__ void multiply_tiles(
    const Weights& weights, const Shape& shape, int tiles, const Begin& begin, const Store& store
) {
    extern __shared__ __align__(16) char rings[];
    constexpr int kRingBytes = STAGES * Weights::kStageBytes;
    auto all_sums = reinterpret_cast<float(*)[WARPS][kSums][32]>(rings + WARPS * kRingBytes);  // two buffers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char* ring = rings + warp * kRingBytes;

    const unsigned ring_address = static_cast<unsigned>(__cvta_generic_to_shared(ring));

    // The next copy: a step of a tile, to a place in the ring.
    int ahead_tile = blockIdx.x, ahead_step = warp, ahead_place = 0;
    auto source = weights.source(shape, ahead_tile, lane);
    const auto copy_next = [&] {
        if (ahead_tile < tiles && ahead_step < weights.steps)
            weights.copy(ring_address + ahead_place, source, ahead_step, lane);
        commit();
        ahead_place = ahead_place + Weights::kStageBytes == kRingBytes ? 0 : ahead_place + Weights::kStageBytes;
        ahead_step += WARPS;
        if (ahead_step - warp < weights.steps) return;  // all warps take equally many turns; the last may have no step
        ahead_step = warp;
        ahead_tile += gridDim.x;
        if (ahead_tile < tiles) source = weights.source(shape, ahead_tile, lane);
    };
#pragma unroll 1
    for (int count = 0; count < STAGES - 1; ++count) copy_next();
    wait_for_previous();
    begin();
    // With one row tile there are enough registers to load x before the wait for weights.
    constexpr bool kEarly = ROW_TILES == 1;
    int place = 0, buffer = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const auto inputs = weights.inputs(shape, tile, lane);
        Sums sums = {};
#pragma unroll 1
        for (int step = warp; step - warp < weights.steps; step += WARPS) {
            typename Weights::X x;
            if (kEarly && step < weights.steps) weights.load(x, inputs, step, lane);
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncwarp();  // scales are copied by other lanes, and all have read the stage that is filled next
            copy_next();
            if (step < weights.steps) {
                if (!kEarly) weights.load(x, inputs, step, lane);
                weights.add(sums, ring + place, x, lane);
            }
            place = place + Weights::kStageBytes == kRingBytes ? 0 : place + Weights::kStageBytes;
        }
        finish(weights, sums, inputs);
#pragma unroll
        for (int output = 0; output < OUTPUT_TILES; ++output)
#pragma unroll
            for (int row = 0; row < ROW_TILES; ++row)
#pragma unroll
                for (int part = 0; part < 2 * kPerHalf; ++part)
                    all_sums[buffer][warp][(output * ROW_TILES + row) * 2 * kPerHalf + part][lane] =
                        sums[output][row][part];
        __syncthreads();
        store(tile, all_sums[buffer]);
        buffer ^= 1;  // the other buffer was read before the __syncthreads above
    }
}

template <class Weights>
__device__ __forceinline__ void few_rows(const Weights& weights, const Shape& shape, const Bits* bias, Bits* out) {
    start_next();
    const int tiles = static_cast<int>((shape.out_size + kOutputs - 1) / kOutputs) * shape.row_tiles.value;
    const auto begin = [&] { prepare(weights, shape, static_cast<int>(shape.rows)); };
    multiply_tiles(weights, shape, tiles, begin, [&](int number, const float (&sums)[WARPS][kSums][32]) {
        store_tile(out, sums, shape, bias, number);
    });
}

}  // namespace
