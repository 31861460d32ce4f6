// Attention over selected rows of 512 + 64 elements, 64 heads at a time; see kernels/mla/sparse_mla.py for the formula.
//
// A block has a token, 64 of its heads and a share of its rows, and processes 64 rows at a time. Its first warpgroup, the
// scorer, multiplies the query with the rows and turns scores into weights; the query stays in its registers. The other
// two, the adders, multiply the weights with one half of the values each, and keep the sums in their registers. Rows go
// through a ring of three stages in shared memory, which the adders refill as soon as they have used a stage. The last
// tile of a row is not a value; the weights overwrite it once the scores are computed.
//
// For 64 rows the tensor cores need 1,150 clocks for the scores and 1,020 for the sums; computing the weights takes about
// 900 clocks without tensor cores. To keep them busy meanwhile, weights are handed over late: when the scorer is half
// through the next rows. The adders multiply while the scorer computes the next weights.
//
// The blocks of all shares are a cluster. At the end each of them sums some of the columns.
//
// Constants: SHARES (a power of two), PAGE_SIZE, HALF (see hopper.cuh).

#include "hopper.cuh"
#include "online_softmax.cuh"

namespace {

constexpr int kHeads = 64;      // of a block
constexpr int kBlockRows = 64;  // rows that are multiplied together
constexpr int kTiles = 9;       // of 64 elements, in a row
constexpr int kValueTiles = 8;
constexpr int kFirstTiles = 4;  // multiplied before the others are there
constexpr int kTileBytes = kBlockRows * 128;
constexpr int kStages = 3;
constexpr int kStageBytes = kTiles * kTileBytes;
constexpr int kWeights = kValueTiles * kTileBytes;  // offset of the weights in a stage: the last tile
constexpr int kQueryStage = kStages - 1;            // the stage that holds the query until it is in registers
constexpr int kRegisterSteps = 4 * kValueTiles - 1;  // steps of 16 query elements in registers, which hold no more
constexpr int kThreads = 3 * 128;
constexpr int kScorerRegisters = 184, kAdderRegisters = 160;  // of a thread; 3 * 168 together
constexpr int kScannedRows = 8;                               // of a thread at a time
constexpr int kShares = SHARES;
constexpr int kOwnSums = 128 / kShares;  // of those of a thread, in the end
enum { kAllThreads, kScorer, kAdders, kCounted };  // barriers of sync_threads

struct Shared {
    unsigned char stages[kStages][kStageBytes];
    unsigned char query_rest[kTileBytes];   // its last tile
    unsigned char query_step[kHeads * 32];  // the 16 elements that are not in registers
    float shrink[kStages][kHeads];
    int any_shrinks[kStages][4];  // by warp
    int last_row;
    unsigned long long first_fetched[kStages], all_fetched[kStages], weighted[kStages], query_read;

    // Reference and sum of all weights of a head, when all rows are done.
    __device__ float2* totals() { return reinterpret_cast<float2*>(query_rest); }
};
static_assert(sizeof(Shared) <= 232448 && kOwnSums % 8 == 0, "what a block can have, and what store() takes");

struct Rows {  // of a share
    const int* numbers;
    int count;

    __device__ int operator[](int i) const { return i < count ? numbers[i] : -1; }
};

struct Pages {
    const char* start;
    long long page_bytes, slot_bytes;

    __device__ const char* row(int number) const {
        return start + number / PAGE_SIZE * page_bytes + number % PAGE_SIZE * slot_bytes;
    }
};

// Stages are used in turn; a barrier's phase is the turn.
struct Turn {
    int stage = 0;
    unsigned phase = 0;

    __device__ void next() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ int previous_stage() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

__device__ __forceinline__ int thread_in_group() { return threadIdx.x % 128; }
__device__ __forceinline__ int warp_in_group() { return threadIdx.x % 128 / 32; }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
// First head of a thread, which has two; the other is 8 further.
__device__ __forceinline__ int first_head() { return 16 * warp_in_group() + lane() / 4; }

// The adders fetch 64 rows; zeros for those that do not exist.
__device__ __forceinline__ void fetch(Shared& shared, const Rows& rows, const Pages& pages, int block, int stage) {
    const int line = (threadIdx.x - 128) / 8, word = threadIdx.x % 8;
    const char* from[2];
    bool exists[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = rows[block * kBlockRows + line + 32 * i];
        exists[i] = row >= 0;
        from[i] = pages.row(max(row, 0)) + word * 16;
    }
    const unsigned to = shared_address(shared.stages[stage]) + word_in_tile(line, word);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < kFirstTiles; ++tile) {
            copy_16_async(to + tile * kTileBytes + i * 32 * 128, from[i] + tile * 128, exists[i]);
        }
    }
    arrive_after_copies(shared_address(&shared.first_fetched[stage]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = kFirstTiles; tile < kTiles; ++tile) {
            copy_16_async(to + tile * kTileBytes + i * 32 * 128, from[i] + tile * 128, exists[i]);
        }
    }
    arrive_after_copies(shared_address(&shared.all_fetched[stage]));
}

// The scorer starts to copy the query to its stage, and its last tile to query_rest.
__device__ __forceinline__ void fetch_query(Shared& shared, const char* query, long long head_bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = thread_in_group() / 8 + 16 * i, word = threadIdx.x % 8;
        const char* const from = query + line * head_bytes + word * 16;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const unsigned to = tile < kValueTiles ? shared_address(shared.stages[kQueryStage]) + tile * kTileBytes
                                                   : shared_address(shared.query_rest);
            copy_16_async(to + word_in_tile(line, word), from + tile * 128, true);
        }
    }
}

// The matrices of 16 heads x 16 elements of the warp; lane l has the address of line l % 16, of half l / 16 of it.
__device__ __forceinline__ int matrix_line() { return 16 * warp_in_group() + lane() % 16; }

__device__ __forceinline__ void read_query(Shared& shared, unsigned (&query)[kRegisterSteps][4]) {
    const unsigned from = shared_address(shared.stages[kQueryStage]);
    const auto place = [&](int step) {
        return from + step / 4 * kTileBytes + word_in_tile(matrix_line(), step % 4 * 2 + lane() / 16);
    };
#pragma unroll
    for (int step = 0; step < kRegisterSteps; ++step) load_matrices(query[step], place(step));
    unsigned last[4];
    load_matrices(last, place(kRegisterSteps));
    store_matrices(shared_address(shared.query_step) + lane() / 16 * 1024 + matrix_line() * 16, last);
    fence_async();
    __syncwarp();
    if (lane() == 0) arrive(shared_address(&shared.query_read));
    sync_threads<kScorer, 128>();
}

// scores [64 heads, 64 rows]; half way, hands the weights of the previous rows to the adders
__device__ __forceinline__ void multiply_query(Shared& shared, const unsigned (&query)[kRegisterSteps][4],
                                               const Turn& turn, float (&scores)[32], bool hand_over) {
    const unsigned stage = shared_address(shared.stages[turn.stage]);
    const auto row_step = [&](int step) { return tile_operand(stage) + (step / 4 * kTileBytes + step % 4 * 32) / 16; };
    wait_phase(shared_address(&shared.first_fetched[turn.stage]), turn.phase);
    fence_async();
    begin_products(scores);
#pragma unroll
    for (int step = 0; step < 4 * kFirstTiles; ++step) multiply_64x64(scores, query[step], row_step(step), step > 0);
    commit_products();
    wait_phase(shared_address(&shared.all_fetched[turn.stage]), turn.phase);
    fence_async();
    fence_registers();
#pragma unroll
    for (int step = 4 * kFirstTiles; step < kRegisterSteps; ++step) {
        multiply_64x64(scores, query[step], row_step(step), true);
    }
    multiply_64x64(scores, column_operand(shared_address(shared.query_step)), row_step(kRegisterSteps));
#pragma unroll
    for (int step = 4 * kValueTiles; step < 4 * kTiles; ++step) {
        multiply_64x64(scores, tile_operand(shared_address(shared.query_rest)) + step % 4 * 2, row_step(step));
    }
    commit_products();
    wait_for_first_products();
    if (hand_over && lane() == 0) arrive(shared_address(&shared.weighted[turn.previous_stage()]));
    finish_products(scores);
}

// The rows of the block that do not exist have no score.
__device__ __forceinline__ void mask(const Rows& rows, int block, float (&scores)[32]) {
    const unsigned exists[2] = {__ballot_sync(kAll, rows[block * kBlockRows + lane()] >= 0),
                                __ballot_sync(kAll, rows[block * kBlockRows + 32 + lane()] >= 0)};
    if ((exists[0] & exists[1]) == kAll) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = i / 4 * 8 + i % 2;  // + lane % 4 * 2
        if (!(exists[row / 32] >> (lane() % 4 * 2) >> row % 32 & 1)) scores[i] = -__int_as_float(0x7f800000);
    }
}

__device__ __forceinline__ void score(Shared& shared, const Rows& rows, int blocks,
                                      const unsigned (&query)[kRegisterSteps][4], float scale) {
    Softmax<32> softmax;
    float scores[32];
    Turn turn;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        multiply_query(shared, query, turn, scores, block > 0);
        mask(rows, block, scores);
        float shrink[2];
        const bool any = softmax.weigh(scores, scale, shrink) && block > 0;  // the first block has no earlier sums
        if (any && lane() % 4 == 0) {
            shared.shrink[turn.stage][first_head()] = shrink[0];
            shared.shrink[turn.stage][first_head() + 8] = shrink[1];
        }
        if (lane() == 0) shared.any_shrinks[turn.stage][warp_in_group()] = any;
        sync_threads<kScorer, 128>();  // all have multiplied with the last tile
        const unsigned weights = shared_address(shared.stages[turn.stage]) + kWeights;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned words[4] = {
                round_pair(scores[8 * i], scores[8 * i + 1]), round_pair(scores[8 * i + 2], scores[8 * i + 3]),
                round_pair(scores[8 * i + 4], scores[8 * i + 5]), round_pair(scores[8 * i + 6], scores[8 * i + 7])};
            store_matrices(weights + word_in_tile(matrix_line(), 2 * i + lane() / 16), words);
        }
        fence_async();
        __syncwarp();
        if (block + 1 == blocks && lane() == 0) arrive(shared_address(&shared.weighted[turn.stage]));
        turn.next();
    }
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        float sum = softmax.sum[head];
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        if (lane() % 4 == 0) shared.totals()[first_head() + 8 * head] = make_float2(softmax.reference[head], sum);
    }
}

// sums [64 heads, 256 columns] of one half of the values
__device__ __forceinline__ void add(Shared& shared, const Rows& rows, const Pages& pages, int blocks, int half,
                                    float (&sums)[128]) {
    Turn turn;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        wait_phase(shared_address(&shared.weighted[turn.stage]), turn.phase);
        if (shared.any_shrinks[turn.stage][warp_in_group()]) {
            const float* const of_head = shared.shrink[turn.stage] + first_head();
            const float shrink[2] = {of_head[0], of_head[8]};
#pragma unroll
            for (int i = 0; i < 128; ++i) sums[i] *= shrink[i % 4 / 2];
        }
        fence_async();
        const unsigned stage = shared_address(shared.stages[turn.stage]);
        const unsigned long long weights = tile_operand(stage + kWeights);
        const unsigned long long values = tile_operand(stage + half * kValueTiles / 2 * kTileBytes, kTileBytes);
        begin_products(sums);
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // of 16 rows
            multiply_64x256(sums, weights + step * 32 / 16, values + step * 16 * 128 / 16);
        }
        commit_products();
        finish_products(sums);
        sync_threads<kAdders, 256>();  // all have multiplied with this stage
        if (block + kStages < blocks) fetch(shared, rows, pages, block + kStages, turn.stage);
        turn.next();
    }
}

__device__ __forceinline__ void sync_shares() {
#if SHARES > 1
    sync_cluster();
#else
    __syncthreads();
#endif
}

// Factors of the sums of each share before they are added, for the two heads of a thread: the weight of the
// share over the total. 0 for a token without rows.
__device__ __forceinline__ void weigh_shares(Shared& shared, float (&factors)[kShares][2]) {
    float2 totals[kShares][2];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const unsigned place = shared_address(shared.totals() + first_head() + 8 * head);
            totals[i][head] = load_remote(kShares > 1 ? in_block(place, i) : place);
        }
    }
#pragma unroll
    for (int head = 0; head < 2; ++head) {
        float most = kLowest, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kShares; ++i) most = max(most, totals[i][head].x);
#pragma unroll
        for (int i = 0; i < kShares; ++i) {
            factors[i][head] = exp2_approximate(totals[i][head].x - most);
            sum += factors[i][head] * totals[i][head].y;
        }
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
        for (int i = 0; i < kShares; ++i) factors[i][head] *= inverse;
    }
}

// Rounds a warp's 16 heads x 2 * kOwnSums columns, and stores them through shared memory, in whole sectors.
__device__ __forceinline__ void store(const float* sums, unsigned char* staging, char* out) {
    constexpr int kLineBytes = 4 * kOwnSums, kPitch = kLineBytes + 16, kLineWords = kLineBytes / 16;
    const unsigned to = shared_address(staging) + lane() % 16 * kPitch + lane() / 16 * 16;
#pragma unroll
    for (int i = 0; i < kOwnSums; i += 8) {
        const unsigned words[4] = {round_pair(sums[i], sums[i + 1]), round_pair(sums[i + 2], sums[i + 3]),
                                   round_pair(sums[i + 4], sums[i + 5]), round_pair(sums[i + 6], sums[i + 7])};
        store_matrices(to + i * 4, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane(); i < 16 * kLineWords; i += 32) {
        const int line = i / kLineWords, word = i % kLineWords;
        *reinterpret_cast<uint4*>(out + line * 1024 + word * 16) =
            *reinterpret_cast<const uint4*>(staging + line * kPitch + word * 16);
    }
}

// Block i of the cluster gets all sums number [i * kOwnSums, (i + 1) * kOwnSums) of every adder, adds and stores them.
// `out` is where the block's first head begins.
__device__ __forceinline__ void add_shares(Shared& shared, int share, int half, float (&sums)[128], char* out) {
    sync_shares();  // all totals are written, and all stages are free
    const auto place = [&](int from) { return (from * 2 + half) * kOwnSums * 128 * 4; };
#pragma unroll
    for (int owner = 0; owner < kShares; ++owner) {
        if (owner == share) continue;
        const unsigned to = in_block(shared_address(shared.stages[0] + place(share)) + thread_in_group() * 16, owner);
#pragma unroll
        for (int i = 0; i < kOwnSums; i += 4) {
            const float* const four = sums + owner * kOwnSums + i;
            store_remote(to + i * 128 * 4, four[0], four[1], four[2], four[3]);
        }
    }
    float factors[kShares][2];
    weigh_shares(shared, factors);
    sync_shares();
#pragma unroll
    for (int owner = 0; owner < kShares; ++owner) {  // unrolled, so that register indices are constants
        if (owner != share) continue;
        float* const own = sums + owner * kOwnSums;
#pragma unroll
        for (int i = 0; i < kOwnSums; ++i) own[i] *= factors[owner][i % 4 / 2];
#pragma unroll
        for (int other = 0; other < kShares; ++other) {
            if (other == owner) continue;
            const float4* const from =
                reinterpret_cast<const float4*>(shared.stages[0] + place(other)) + thread_in_group();
#pragma unroll
            for (int i = 0; i < kOwnSums; i += 4) {
                const float4 more = from[i * 32];
                own[i] += factors[other][0] * more.x;
                own[i + 1] += factors[other][0] * more.y;
                own[i + 2] += factors[other][1] * more.z;
                own[i + 3] += factors[other][1] * more.w;
            }
        }
        store(own, shared.stages[0] + place(share) + warp_in_group() * kOwnSums * 128,
              out + 16 * warp_in_group() * 1024 + half * 512 + owner * kOwnSums * 4);
    }
}

__device__ __forceinline__ int count_blocks(const Shared& shared) {
    return (shared.last_row + kBlockRows - 1) / kBlockRows;
}

// The scorer counts the blocks of rows up to the last existing row, and signals the adders without waiting for them.
__device__ __forceinline__ int find_last_row(Shared& shared, const Rows& rows) {
    int last = 0;  // the number after it
    for (int first = thread_in_group(); first < rows.count; first += kScannedRows * 128) {
        int row[kScannedRows];
#pragma unroll
        for (int i = 0; i < kScannedRows; ++i) row[i] = rows[first + 128 * i];
#pragma unroll
        for (int i = 0; i < kScannedRows; ++i) {
            if (row[i] >= 0) last = first + 128 * i + 1;
        }
    }
    last = __reduce_max_sync(kAll, last);
    if (lane() == 0) atomicMax(&shared.last_row, last);
    sync_threads<kScorer, 128>();
    arrive_threads<kCounted, kThreads>();
    return count_blocks(shared);
}

}  // namespace

// query [T, heads, 576], out [T, heads, 512]; SHARES blocks of kThreads for every 64 heads of every token.
#if SHARES > 1
extern "C" __global__ void __cluster_dims__(SHARES, 1, 1) __launch_bounds__(kThreads, 1)
#else
extern "C" __global__ void __launch_bounds__(kThreads, 1)
#endif
sparse_mla(const char* query, long long token_bytes, long long head_bytes, const char* pages, long long page_bytes,
           long long slot_bytes, const int* rows, long long rows_stride, long long num_rows, long long share_rows,
           long long scale_bits, char* out, long long heads) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&shared.first_fetched[stage]), 256);
            init_barrier(shared_address(&shared.all_fetched[stage]), 256);
            init_barrier(shared_address(&shared.weighted[stage]), 4);
        }
        init_barrier(shared_address(&shared.query_read), 4);
        fence_barriers();
        shared.last_row = 0;
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const int share = blockIdx.x % kShares, tiles = static_cast<int>(heads) / kHeads;
    const int tile = blockIdx.x / kShares % tiles;
    const long long token = blockIdx.x / kShares / tiles;
    const Rows own_rows = {rows + token * rows_stride + share * share_rows,
                           static_cast<int>(min(share_rows, num_rows - share * share_rows))};
    if (threadIdx.x < 128) {
        take_registers<kScorerRegisters>();
        fetch_query(shared, query + token * token_bytes + tile * kHeads * head_bytes, head_bytes);
        const int blocks = find_last_row(shared, own_rows);
        wait_for_copies();
        fence_async();
        sync_threads<kScorer, 128>();
        unsigned in_registers[kRegisterSteps][4];
        read_query(shared, in_registers);
        score(shared, own_rows, blocks, in_registers, __int_as_float(static_cast<int>(scale_bits)));
        sync_shares();
        sync_shares();
    } else {
        give_registers<kAdderRegisters>();
        const int half = threadIdx.x / 128 - 1;
        const Pages all_pages = {pages, page_bytes, slot_bytes};
        // without waiting for the count: unneeded fetches do no harm
        if (own_rows.count > 0) fetch(shared, own_rows, all_pages, 0, 0);
        if (own_rows.count > kBlockRows) fetch(shared, own_rows, all_pages, 1, 1);
        sync_threads<kCounted, kThreads>();
        const int blocks = count_blocks(shared);
        wait_phase(shared_address(&shared.query_read), 0);
        if (blocks > kQueryStage) fetch(shared, own_rows, all_pages, kQueryStage, kQueryStage);
        float sums[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
        add(shared, own_rows, all_pages, blocks, half, sums);
        wait_for_copies();
        add_shares(shared, share, half, sums, out + (token * heads + tile * kHeads) * 512 * 2);
    }
}
