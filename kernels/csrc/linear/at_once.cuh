// Common parts of the kernels that load all weights of a linear layer into the shared memory of all multiprocessors at
// once, for Hopper.
//
// A thread block computes a tile of weight rows. With CLUSTER > 1, the blocks of a cluster divide the columns of the
// tile. A block copies all its weights to shared memory before the previous kernel has ended, and multiplies them when
// x is available. Each warp multiplies 128 of every 1,024 columns. Then the sums of the warps are added. In a cluster,
// each block sends its sums to the block that stores them, which adds them. The order of all additions is fixed.
//
// A product is one mma instruction: 16 weight rows (a unit) x 16 columns x 8 rows of x (a row tile); see
// fp8_halves.cuh.
//
// Constants: UNITS of 16 weight rows in a tile; ROW_TILES of 8 rows of x; CLUSTER; WEIGHT_BYTES of an element.

#pragma once

#include "linear/fp8_halves.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kRoundColumns = kWarps * kBlock, kMostRounds = 2;
constexpr int kWeightRows = 16 * UNITS;
constexpr int kPad = 64;  // bytes after a row in shared memory, so that 8 adjacent rows are in different banks
constexpr int kSums = 4 * UNITS * ROW_TILES;  // of a thread
constexpr int kPairs = kSums / 2, kOwnPairs = (kPairs + CLUSTER - 1) / CLUSTER;

typedef float Sums[UNITS][ROW_TILES][4];

struct Exchange {
    float2 parts[CLUSTER][kOwnPairs][32];
    unsigned long long filled[kMostRounds];
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

// The columns of this block, in groups of 128.
struct Columns {
    int first, count;

    __device__ __forceinline__ explicit Columns(int all) {
        const int share = (all / kBlock + CLUSTER - 1) / CLUSTER;
        first = block_rank() * share;
        count = max(min(share, all / kBlock - first), 0);
    }

    // Bytes between weight rows in shared memory.
    __device__ __forceinline__ int pitch() const { return count * kBlock * WEIGHT_BYTES + kPad; }
};

// Starts the copies of all weights; `row_address(row)` is the address of a row of the tile in global memory.
template <typename RowAddress>
__device__ __forceinline__ void copy_weights(
    const Columns& columns, unsigned char* memory, Exchange& exchange, RowAddress row_address
) {
    const auto bytes_of = [&](int round) {
        return min(columns.count - round * kWarps, kWarps) * kBlock * WEIGHT_BYTES;
    };
    if (threadIdx.x == 0) {
        for (int round = 0; round < kMostRounds; ++round) init_barrier(shared_address(&exchange.filled[round]), 1);
        fence_barriers();
        for (int round = 0; round * kWarps < columns.count; ++round)
            expect_bytes(shared_address(&exchange.filled[round]), kWeightRows * bytes_of(round));
    }
    __syncthreads();
    if (threadIdx.x >= kWeightRows) return;
    const char* const from = row_address(threadIdx.x) + static_cast<long long>(columns.first) * kBlock * WEIGHT_BYTES;
    const unsigned to = shared_address(memory) + threadIdx.x * columns.pitch();
    for (int round = 0; round * kWarps < columns.count; ++round) {
        const int before = round * kRoundColumns * WEIGHT_BYTES;
        copy_bulk_async(to + before, from + before, bytes_of(round), shared_address(&exchange.filled[round]));
    }
}

// Called before x is read, and before the shared memory of another block is written.
__device__ __forceinline__ void wait_for_x() {
    __syncwarp();
    if (CLUSTER > 1) sync_cluster();  // all blocks have started: they can be written to
    wait_for_previous();
}

// Adds the sums of all warps, and of all blocks of the cluster. A pair of sums belongs to one row of x and to two
// weight rows, `quad` and `quad` + 8; `store(pair, sums)` stores it.
template <typename Store>
__device__ __forceinline__ void add_sums(unsigned char* memory, Exchange& exchange, const Sums& sums, Store store) {
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
            store(pair, total);
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
        store(pair, total);
    }
}

}  // namespace
