// Experts with fp8 weights and few tokens each, for Hopper: multiplies tiles of tokens (kernels/moe/router/routing.py)
// with the weights of their expert.
//
//     GATED    out[place]   =  swiglu(gate_up[expert] @ x[token])       places in the order of experts
//     else     out[number]  =  down[expert] @ x[place]
//
// Products are those of fp8_halves.cuh. One warp of a thread block, the producer, copies weights into a ring in shared
// memory, several stages ahead, also those of later tiles; the other 8 warps multiply them. A stage holds two units of
// 16 weight rows and 1,024 columns. Each warp multiplies 128 of the columns; at the end of the rows the sums of the
// warps are added in a fixed order. With WHOLE_ROWS, a stage holds one unit of 128 rows with at most 256 columns, and
// each warp multiplies 16 of the rows.
//
// Multiprocessors read at different rates: with equal shares, half of the blocks ended after 133 us and the last one
// after 150 us (H200). So each block starts with a fixed range of units, 6/8 of an equal share. Then the blocks take
// the remaining units from a common counter, a few at a time.
//
// Constants: GATED; WHOLE_ROWS; HALF, 1 if x is float16, 0 if it is bfloat16.

#include "linear/fp8_halves.cuh"

namespace {

constexpr int kWarps = 8;  // warps that multiply
constexpr int kStageColumns = kWarps * kBlock, kMostWholeColumns = 256;
constexpr int kStages = 3;
constexpr int kUnitRows = WHOLE_ROWS ? 16 * kWarps : 16;
constexpr int kUnits = WHOLE_ROWS ? 1 : 2;  // of a stage
constexpr int kStageBytes = kUnits * kUnitRows * (WHOLE_ROWS ? kMostWholeColumns : kStageColumns);
constexpr int kOutputs = kUnitRows / (GATED ? 2 : 1);  // of a unit
constexpr int kRows = 8;  // of x, in a tile
constexpr int kSums = kUnits * 4;  // of a thread
constexpr int kTaken = WHOLE_ROWS ? 4 : kUnits;  // units that a block takes from the counter at a time
constexpr int kFixedEighths = 6;  // eighths of an equal share, in the fixed range of a block
static_assert(!(GATED && WHOLE_ROWS), "the columns of gate and up are those of the model");

// Units of a tile that are multiplied together, at most as many as a stage holds; 0 units: no work is left.
struct Group {
    int tile, unit, units;
};

struct Shared {
    unsigned char stages[kStages][kStageBytes];
    float sums[WHOLE_ROWS ? 1 : kWarps][kSums][32];
    Group groups[kStages];  // of each stage
    unsigned long long announced[kStages], filled[kStages], read[kStages];
};
static_assert(2 * (sizeof(Shared) + 1024) <= 228 << 10, "two blocks run on a multiprocessor");

struct Matrices {
    const unsigned char* values;
    const float* scales;
    int row_shift, scale_rows, scale_stride, scale_step;  // 2^row_shift rows share scales; step 0: one scale per row

    // The scale of a weight row and a block of columns.
    __device__ __forceinline__ const float* scale(int expert, int row, int block) const {
        const long long scale_row = expert * scale_rows + (row >> row_shift);
        return scales + scale_row * scale_stride + block * scale_step;
    }
};

// Tiles of tokens; the first used() of them are used.
struct Tiles {
    const int *experts, *firsts, *ends, *order;
    int* counts;
    int per_token;

    // Bypasses the L1 cache: the second product reads it before wait_for_previous, and the L1 line may be stale.
    __device__ __forceinline__ int expert(int tile) const { return __ldcg(experts + tile); }

    __device__ __forceinline__ int used() const { return __ldcg(counts); }
    // The common counter of this product: units that its blocks have taken.
    __device__ __forceinline__ int* taken() const { return counts + (GATED ? 1 : 2); }
};

// The tile that a thread multiplies.
struct Tile {
    int number = -1, expert = 0;
    int row = 0;               // the row of x that this thread loads; the last one if the tile has fewer rows
    int results[2] = {-1, -1};  // the rows of `out` that this thread computes; -1 if there is none

    // Returns whether the tile changed.
    __device__ __forceinline__ bool move_to(int to, const Tiles& tiles) {
        if (to == number) return false;
        number = to;
        expert = tiles.experts[to];
        const int first = tiles.firsts[to], count = min(tiles.ends[expert] - first, kRows);
        const int place = first + min(quad(), count - 1);
        row = GATED ? tiles.order[place] / tiles.per_token : place;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int other = 2 * part() + i;
            results[i] = other >= count ? -1 : GATED ? first + other : tiles.order[first + other];
        }
        return true;
    }
};

struct Sizes {
    int out, in;
    int units, steps;  // of a tile: groups of weight rows, and ranges of columns

    // The weight row in row `row` of a stage that begins with `unit`. Rows of gate and up alternate in groups of 8.
    __device__ __forceinline__ int weight_row(int unit, int row) const {
        if (!GATED) return min(unit * kOutputs + row, out - 1);
        return min(unit * kOutputs + row / 16 * 8 + row % 8, out - 1) + (row % 16 >= 8 ? out : 0);
    }
};

// The units that a block computes: first its fixed range, then those that it takes from the common counter.
struct Units {
    int all, own;   // units of all tiles; units in the fixed range of each block
    int* taken;     // the common counter; it grows in steps of kTaken
    int next, end;  // the current range

    __device__ __forceinline__ Units(int all, int* taken) : all(all), taken(taken) {
        own = all / static_cast<int>(gridDim.x) * kFixedEighths / 8 / kUnits * kUnits;
        next = own * blockIdx.x;
        end = next + own;
    }

    // Called by a whole warp. Returns a group of 0 units if none are left.
    __device__ __forceinline__ Group take(const Sizes& sizes) {
        if (next == end) {
            int before = 0;
            if (lane() == 0) before = atomicAdd(taken, kTaken);
            next = min(own * static_cast<int>(gridDim.x) + __shfl_sync(kAll, before, 0), all);
            end = min(next + kTaken, all);
        }
        const int tile = next / sizes.units, unit = next % sizes.units;
        const int count = min(min(kUnits, end - next), sizes.units - unit);
        next += count;
        return {tile, unit, count};
    }
};

struct Ring {
    Shared& shared;
    int stage = 0;
    unsigned round = 0;

    __device__ __forceinline__ void advance() {
        if (++stage < kStages) return;
        stage = 0;
        ++round;
    }
    __device__ __forceinline__ unsigned filled() const { return shared_address(&shared.filled[stage]); }
    __device__ __forceinline__ unsigned read() const { return shared_address(&shared.read[stage]); }
    __device__ __forceinline__ void wait_for_room() const {
        if (round > 0) wait_phase(read(), round - 1);
    }
    __device__ __forceinline__ void announce(const Group& group) const {
        shared.groups[stage] = group;
        arrive(shared_address(&shared.announced[stage]));
    }
    __device__ __forceinline__ Group wait_for_group() const {
        wait_phase(shared_address(&shared.announced[stage]), round);
        return shared.groups[stage];
    }
    __device__ __forceinline__ const unsigned char* wait_for_weights() const {
        wait_phase(filled(), round);
        return shared.stages[stage];
    }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (lane() == 0) arrive(read());
    }
};

__device__ __forceinline__ void copy_weights(
    Ring ring, const Matrices& all, const Tiles& tiles, const Sizes& sizes, Units units
) {
    int tile = -1, expert = 0;
    while (true) {
        const Group group = units.take(sizes);
        if (group.units && group.tile != tile) {
            tile = group.tile;
            expert = tiles.expert(tile);
        }
        const int rows = kUnitRows * group.units;
        const char* const matrix = reinterpret_cast<const char*>(all.values) +
                                   static_cast<long long>(expert) * (GATED ? 2 : 1) * sizes.out * sizes.in;
        for (int step = 0; step < sizes.steps; ++step, ring.advance()) {
            const unsigned to = shared_address(ring.shared.stages[ring.stage]), barrier = ring.filled();
            ring.wait_for_room();
            if (lane() == 0) ring.announce(group);
            if (!group.units) return;
            if (WHOLE_ROWS) {
                const int first = group.unit * kOutputs, bytes = min(sizes.out - first, rows) * sizes.in;
                if (lane() == 0) {
                    expect_bytes(barrier, bytes);
                    copy_bulk_async(to, matrix + static_cast<long long>(first) * sizes.in, bytes, barrier);
                }
            } else {
                const int bytes = min(sizes.in - step * kStageColumns, kStageColumns);
                if (lane() == 0) expect_bytes(barrier, rows * bytes);
                __syncwarp();
                if (lane() < rows) {
                    const long long row = sizes.weight_row(group.unit, lane());
                    const char* const from = matrix + row * sizes.in + step * kStageColumns;
                    copy_bulk_async(to + lane() * kStageColumns, from, bytes, barrier);
                }
            }
        }
    }
}

// Adds the sums of all warps and stores the results.
__device__ __forceinline__ void store_sums(
    Shared& shared, const float (&sums)[kUnits][4], int units, const Tile& tile, Bits* out, int first, int out_size
) {
    sync_threads<1, 32 * kWarps>();  // the previous sums have been read
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) shared.sums[warp()][sum][lane()] = sums[sum / 4][sum % 4];
    sync_threads<1, 32 * kWarps>();
    constexpr int kStored = GATED ? 2 : 4;  // results of four sums; with a gate, the last two sums belong to up
    for (int number = warp(); number < units * kStored; number += kWarps) {
        const int i = number % kStored, unit = number / kStored;
        const int row = i % 2 ? tile.results[1] : tile.results[0];
        const int output = first + quad() + (GATED ? 8 * unit : 16 * unit + i / 2 * 8);
        if (row < 0 || output >= out_size) continue;
        float total = 0.0f, up = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            total += shared.sums[other][4 * unit + i][lane()];
            if (GATED) up += shared.sums[other][4 * unit + i + 2][lane()];
        }
        out[static_cast<long long>(row) * out_size + output] = to_bits(GATED ? swiglu(total, up) : total);
    }
}

__device__ __forceinline__ void multiply_columns(
    Ring ring, const Matrices& all, const Tiles& tiles, const Sizes& sizes, const Bits* x, Bits* out
) {
    Tile tile;
    while (true) {
        const Group group = ring.wait_for_group();
        if (!group.units) return;
        tile.move_to(group.tile, tiles);
        const Bits* const own_x = x + static_cast<long long>(tile.row) * sizes.in;
        const float* scales[kUnits][2];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                scales[unit][half] =
                    all.scale(tile.expert, sizes.weight_row(group.unit, 16 * unit + 8 * half + quad()), 0);
        float sums[kUnits][4] = {};
        for (int step = 0; step < sizes.steps; ++step, ring.advance()) {
            const int block = step * kWarps + warp();
            const bool exists = block * kBlock < sizes.in;
            Row<kBlock> row;
            float own_scales[kUnits][2];
            if (exists) {
                row.load(own_x + block * kBlock);
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        own_scales[unit][half] = scales[unit][half][block * all.scale_step];
            }
            const unsigned char* const stage = ring.wait_for_weights() + warp() * kBlock + part() * 16;
            if (exists) {
                row.convert();
                const float factors[2] = {row.factor_of_result(0), row.factor_of_result(1)};
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) {
                    if (unit >= group.units) break;
                    float parts[4] = {};
                    const unsigned char* const lower = stage + (16 * unit + quad()) * kStageColumns;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        Weights weights;
                        weights.load(lower + half * 64, lower + 8 * kStageColumns + half * 64);
                        add_products(parts, weights, row, half);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[unit][i] += parts[i] * (own_scales[unit][i / 2] * factors[i % 2]);
                }
            }
            ring.release();
        }
        store_sums(ring.shared, sums, group.units, tile, out, group.unit * kOutputs, sizes.out);
    }
}

__device__ __forceinline__ void multiply_whole_rows(
    Ring ring, const Matrices& all, const Tiles& tiles, const Sizes& sizes, const Bits* x, Bits* out
) {
    constexpr int kMostBlocks = kMostWholeColumns / kBlock;
    Tile tile;
    Row<kMostWholeColumns> row;
    float factors[2];
    float next_scales[kMostBlocks][2];  // prefetched, of the unit that probably follows
    int next_unit = -1;
    const auto load_scales = [&](int unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int block = 0; block < kMostBlocks; ++block)
                if (block * kBlock < sizes.in)
                    next_scales[block][half] =
                        *all.scale(tile.expert, sizes.weight_row(unit, 16 * warp() + 8 * half + quad()), block);
    };
    for (;; ring.advance()) {
        const Group group = ring.wait_for_group();
        if (!group.units) return;
        const bool other_tile = tile.move_to(group.tile, tiles);
        if (other_tile) {
            row.load(x + static_cast<long long>(tile.row) * sizes.in, sizes.in);
            row.convert();
            factors[0] = row.factor_of_result(0);
            factors[1] = row.factor_of_result(1);
        }
        if (other_tile || group.unit != next_unit) load_scales(group.unit);
        float scales[kMostBlocks][2];
#pragma unroll
        for (int block = 0; block < kMostBlocks; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) scales[block][half] = next_scales[block][half];
        next_unit = group.unit + 1;
        if (next_unit < sizes.units) load_scales(next_unit);
        const unsigned char* const stage = ring.wait_for_weights() + (16 * warp() + quad()) * sizes.in + part() * 16;
        float parts[kMostBlocks][4] = {};
#pragma unroll
        for (int block = 0; block < kMostBlocks; ++block) {
            if (block * kBlock >= sizes.in) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* const lower = stage + block * kBlock + half * 64;
                Weights weights;
                weights.load(lower, lower + 8 * sizes.in);
                add_products(parts[block], weights, row, 2 * block + half);
            }
        }
        ring.release();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int output = group.unit * kOutputs + 16 * warp() + quad() + i / 2 * 8;
            float total = 0.0f;
#pragma unroll
            for (int block = 0; block < kMostBlocks; ++block)
                if (block * kBlock < sizes.in) total += parts[block][i] * scales[block][i / 2];
            if (tile.results[i % 2] >= 0 && output < sizes.out)
                out[static_cast<long long>(tile.results[i % 2]) * sizes.out + output] = to_bits(total * factors[i % 2]);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * (kWarps + 1), 2) expert_tiles(
    const Bits* x, const unsigned char* values, const float* scales, const int* tile_experts, const int* tile_firsts,
    const int* ends, const int* order, int* counts, Bits* out, long long per_token, long long out_size,
    long long in_size, long long row_shift, long long scale_rows, long long scale_stride, long long scale_step
) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&shared.announced[stage]), 1);
            init_barrier(shared_address(&shared.filled[stage]), 1);
            init_barrier(shared_address(&shared.read[stage]), kWarps);
        }
        fence_barriers();
    }
    __syncthreads();
    if (GATED) wait_for_previous();  // for the tiles, which the second product reads before the first one ends
    start_next();
    const Matrices all = {values, scales, static_cast<int>(row_shift), static_cast<int>(scale_rows),
                          static_cast<int>(scale_stride), static_cast<int>(scale_step)};
    const Tiles tiles = {tile_experts, tile_firsts, ends, order, counts, static_cast<int>(per_token)};
    const Sizes sizes = {static_cast<int>(out_size), static_cast<int>(in_size),
                         static_cast<int>((out_size + kOutputs - 1) / kOutputs),
                         WHOLE_ROWS ? 1 : static_cast<int>((in_size + kStageColumns - 1) / kStageColumns)};
    if (warp() == kWarps) {
        const Units units(tiles.used() * sizes.units, tiles.taken());
        copy_weights({shared}, all, tiles, sizes, units);
        return;
    }
    if (!GATED) wait_for_previous();  // for x
    if (WHOLE_ROWS)
        multiply_whole_rows({shared}, all, tiles, sizes, x, out);
    else
        multiply_columns({shared}, all, tiles, sizes, x, out);
}
