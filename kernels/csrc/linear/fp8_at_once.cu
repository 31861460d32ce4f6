// Linear layers with fp8 weights and few rows of x, for Hopper. All weights must fit in the shared memory of all
// multiprocessors: see at_once.cuh, and fp8_halves.cuh for the products.
//
// Constants: those of at_once.cuh; GATED, 1 if the lower 8 rows of a unit belong to the gate and the upper 8 to up;
// BIAS, 1 if there is one; HALF, 1 if x is float16, 0 if it is bfloat16.

#define WEIGHT_BYTES 1
#include "linear/at_once.cuh"

namespace {

constexpr int kOutputs = kWeightRows / (GATED ? 2 : 1);

struct Layer {
    const Bits* x;
    const unsigned char* values;
    const float* scales;
    const Bits* bias;
    Bits* out;
    int rows, out_size, in_size, row_shift, scale_stride, scale_step;
    int first_output;
    Columns columns;

    __device__ __forceinline__ int weight_row(int row) const {
        if (!GATED) return min(first_output + row, out_size - 1);
        return min(first_output + row / 16 * 8 + row % 8, out_size - 1) + (row % 16 >= 8 ? out_size : 0);
    }

    __device__ __forceinline__ const float* scale(int row, int block) const {
        return scales + (weight_row(row) >> row_shift) * scale_stride + (columns.first + block) * scale_step;
    }
};

// Scales are loaded after the wait for x. Prefetching them into the L2 cache shortens the latency of these loads.
__device__ __forceinline__ void prefetch_scales(const Layer& layer) {
    for (int block = warp(); block < layer.columns.count; block += kWarps)
        for (int row = lane(); row < kWeightRows; row += 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.scale(row, block)));
}

__device__ __forceinline__ void multiply_weights(
    const Layer& layer, const unsigned char* memory, const Exchange& exchange, Sums& sums
) {
#pragma unroll 1
    for (int round = 0; round * kWarps < layer.columns.count; ++round) {
        const int block = round * kWarps + warp();
        if (block >= layer.columns.count) return;
        Row<kBlock> x[ROW_TILES];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            const long long row = min(8 * row_tile + quad(), layer.rows - 1);  // rows after the last read the last
            x[row_tile].load(layer.x + row * layer.in_size + (layer.columns.first + block) * kBlock);
        }
        float scales[UNITS][2];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                scales[unit][half] = *layer.scale(16 * unit + 8 * half + quad(), block);
        float factors[ROW_TILES][2];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            x[row_tile].convert();
#pragma unroll
            for (int i = 0; i < 2; ++i) factors[row_tile][i] = x[row_tile].factor_of_result(i);
        }
        wait_phase(shared_address(&exchange.filled[round]), 0);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const unsigned char* const lower =
                memory + (16 * unit + quad()) * layer.columns.pitch() + block * kBlock + part() * 16;
            float parts[ROW_TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Weights weights;
                weights.load(lower + half * 64, lower + 8 * layer.columns.pitch() + half * 64);
#pragma unroll
                for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
                    add_products(parts[row_tile], weights, x[row_tile], half);
            }
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[unit][row_tile][i] += parts[row_tile][i] * (scales[unit][i / 2] * factors[row_tile][i % 2]);
        }
    }
}

// With a gate, the two weight rows of a pair belong to gate and up.
__device__ __forceinline__ void store_pair(const Layer& layer, int pair, float2 total) {
    const int i = pair % 2, row_tile = pair / 2 % ROW_TILES, unit = pair / 2 / ROW_TILES;
    const int row = 8 * row_tile + 2 * part() + i;
    if (row >= layer.rows) return;
    Bits* const out = layer.out + static_cast<long long>(row) * layer.out_size;
    const int output = layer.first_output + quad() + (GATED ? 8 : 16) * unit;
    const int second = GATED ? layer.out_size + output : output + 8;  // in the bias
    if (BIAS && output < layer.out_size) total.x += to_float(layer.bias[output]);
    if (BIAS && second < (GATED ? 2 : 1) * layer.out_size) total.y += to_float(layer.bias[second]);
    if (output < layer.out_size) out[output] = to_bits(GATED ? swiglu(total.x, total.y) : total.x);
    if (!GATED && second < layer.out_size) out[second] = to_bits(total.y);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * kWarps) fp8_at_once(
    const Bits* x, const unsigned char* values, const float* scales, const Bits* bias, Bits* out, long long rows,
    long long out_size, long long in_size, long long row_shift, long long scale_stride, long long scale_step
) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Exchange exchange;
    start_next();
    const Layer layer = {x, values, scales, bias, out, static_cast<int>(rows), static_cast<int>(out_size),
                         static_cast<int>(in_size), static_cast<int>(row_shift), static_cast<int>(scale_stride),
                         static_cast<int>(scale_step), static_cast<int>(blockIdx.x / CLUSTER) * kOutputs,
                         Columns(static_cast<int>(in_size))};
    copy_weights(layer.columns, memory, exchange, [&](int row) {
        return reinterpret_cast<const char*>(values) + static_cast<long long>(layer.weight_row(row)) * in_size;
    });
    prefetch_scales(layer);
    wait_for_x();
    Sums sums = {};
    multiply_weights(layer, memory, exchange, sums);
    add_sums(memory, exchange, sums, [&](int pair, float2 total) { store_pair(layer, pair, total); });
}
