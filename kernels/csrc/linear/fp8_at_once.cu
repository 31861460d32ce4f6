// Linear layers with fp8 weights and few rows of x, if all weights fit the shared memory of the GPU, for Hopper.
//
// A block has a tile of weight rows, and a range of columns if CLUSTER blocks divide them. It copies all its weights to
// shared memory before the previous kernel has ended, and multiplies them (fp8_halves.cuh) when x is there. Each of its
// warps has 128 of 1,024 columns. Then the sums of warps are added, and those of the blocks of a cluster, which are
// sent to the block that stores them; always in the same order.
//
// Constants: UNITS of 16 weight rows of a tile; ROW_TILES of 8 rows of x; CLUSTER; GATED, 1 if the lower 8 rows of a
// unit are of the gate and the upper 8 of up; BIAS, 1 if there is one; HALF, 1 if x is float16, 0 if it is bfloat16.

#include "linear/fp8_halves.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kRoundColumns = kWarps * kBlock, kMostRounds = 2;
constexpr int kWeightRows = 16 * UNITS, kOutputs = kWeightRows / (GATED ? 2 : 1);
constexpr int kPad = 64;  // bytes after a row in shared memory, so that 8 adjacent rows are in different banks
constexpr int kSums = 4 * UNITS * ROW_TILES;  // of a thread
constexpr int kPairs = kSums / 2, kOwnPairs = (kPairs + CLUSTER - 1) / CLUSTER;

typedef float Sums[UNITS][ROW_TILES][4];

struct Exchange {
    float2 parts[CLUSTER][kOwnPairs][32];
    unsigned long long filled[kMostRounds];
};

struct Layer {
    const Bits* x;
    const unsigned char* values;
    const float* scales;
    const Bits* bias;
    Bits* out;
    int rows, out_size, in_size, row_shift, scale_stride, scale_step;
    int first_output, first_block, blocks;  // of this block: weight rows, and groups of 128 columns

    __device__ __forceinline__ int weight_row(int row) const {
        if (!GATED) return min(first_output + row, out_size - 1);
        return min(first_output + row / 16 * 8 + row % 8, out_size - 1) + (row % 16 >= 8 ? out_size : 0);
    }

    __device__ __forceinline__ const float* scale(int row, int block) const {
        return scales + (weight_row(row) >> row_shift) * scale_stride + (first_block + block) * scale_step;
    }

    __device__ __forceinline__ int pitch() const { return blocks * kBlock + kPad; }
};

__device__ __forceinline__ int block_rank() {
#if CLUSTER > 1
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

__device__ __forceinline__ void copy_weights(const Layer& layer, unsigned char* memory, Exchange& exchange) {
    if (threadIdx.x == 0) {
        for (int round = 0; round < kMostRounds; ++round) init_barrier(shared_address(&exchange.filled[round]), 1);
        fence_barriers();
        for (int round = 0; round * kWarps < layer.blocks; ++round) {
            const int bytes = min(layer.blocks - round * kWarps, kWarps) * kBlock;
            expect_bytes(shared_address(&exchange.filled[round]), kWeightRows * bytes);
        }
    }
    __syncthreads();
    if (threadIdx.x >= kWeightRows) return;
    const char* const from = reinterpret_cast<const char*>(layer.values) +
                             static_cast<long long>(layer.weight_row(threadIdx.x)) * layer.in_size +
                             layer.first_block * kBlock;
    const unsigned to = shared_address(memory) + threadIdx.x * layer.pitch();
    for (int round = 0; round * kWarps < layer.blocks; ++round) {
        const int bytes = min(layer.blocks - round * kWarps, kWarps) * kBlock, before = round * kRoundColumns;
        copy_bulk_async(to + before, from + before, bytes, shared_address(&exchange.filled[round]));
    }
}

// Scales are read when x is there: their latency must not be that of global memory.
__device__ __forceinline__ void prefetch_scales(const Layer& layer) {
    for (int block = warp(); block < layer.blocks; block += kWarps)
        for (int row = lane(); row < kWeightRows; row += 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(layer.scale(row, block)));
}

__device__ __forceinline__ void multiply_weights(
    const Layer& layer, const unsigned char* memory, const Exchange& exchange, Sums& sums
) {
#pragma unroll 1
    for (int round = 0; round * kWarps < layer.blocks; ++round) {
        const int block = round * kWarps + warp();
        if (block >= layer.blocks) return;
        Row<kBlock> x[ROW_TILES];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            const long long row = min(8 * row_tile + quad(), layer.rows - 1);  // the last one instead of none
            x[row_tile].load(layer.x + row * layer.in_size + (layer.first_block + block) * kBlock);
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
                memory + (16 * unit + quad()) * layer.pitch() + block * kBlock + part() * 16;
            float parts[ROW_TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Weights weights;
                weights.load(lower + half * 64, lower + 8 * layer.pitch() + half * 64);
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

// A pair of sums has one row of x and two weight rows, `quad` and 8 further; with a gate, these are of gate and up.
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

// Add the sums of all warps, and of all blocks of the cluster.
__device__ __forceinline__ void add_sums(
    const Layer& layer, unsigned char* memory, Exchange& exchange, const Sums& sums
) {
    auto all_sums = reinterpret_cast<float2(*)[kPairs][32]>(memory);
    __syncthreads();  // weights have been read
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
        const float(&four)[4] = sums[pair / 2 / ROW_TILES][pair / 2 % ROW_TILES];
        all_sums[warp()][pair][lane()] = make_float2(four[pair % 2], four[pair % 2 + 2]);
    }
    __syncthreads();
    const int rank = block_rank();
    for (int pair = warp(); pair < kPairs; pair += kWarps) {
        float2 total = {};
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            const float2 one = all_sums[other][pair][lane()];
            total.x += one.x;
            total.y += one.y;
        }
        if (CLUSTER == 1) {
            store_pair(layer, pair, total);
            continue;
        }
        const unsigned to = in_block(shared_address(&exchange.parts[rank][pair / CLUSTER][lane()]), pair % CLUSTER);
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(total.x), "f"(total.y) : "memory");
    }
    if (CLUSTER == 1) return;
    sync_cluster();
    for (int own = warp(); own < kOwnPairs; own += kWarps) {
        const int pair = own * CLUSTER + rank;
        if (pair >= kPairs) break;
        float2 total = {};
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            total.x += exchange.parts[block][own][lane()].x;
            total.y += exchange.parts[block][own][lane()].y;
        }
        store_pair(layer, pair, total);
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * kWarps) fp8_at_once(
    const Bits* x, const unsigned char* values, const float* scales, const Bits* bias, Bits* out, long long rows,
    long long out_size, long long in_size, long long row_shift, long long scale_stride, long long scale_step
) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Exchange exchange;
    start_next();
    const int all_blocks = static_cast<int>(in_size) / kBlock, share = (all_blocks + CLUSTER - 1) / CLUSTER;
    const int first_block = block_rank() * share;
    const Layer layer = {x, values, scales, bias, out, static_cast<int>(rows), static_cast<int>(out_size),
                         static_cast<int>(in_size), static_cast<int>(row_shift), static_cast<int>(scale_stride),
                         static_cast<int>(scale_step), static_cast<int>(blockIdx.x / CLUSTER) * kOutputs, first_block,
                         min(share, all_blocks - first_block)};
    copy_weights(layer, memory, exchange);
    prefetch_scales(layer);
    __syncwarp();
    if (CLUSTER > 1) sync_cluster();  // all blocks have started: they can be written to
    wait_for_previous();
    Sums sums = {};
    multiply_weights(layer, memory, exchange, sums);
    add_sums(layer, memory, exchange, sums);
}
