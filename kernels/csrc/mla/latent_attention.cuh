// Attention over latent rows of 512 + 64 elements for 64 query rows: what sparse_mla.cu and dense_mla.cu share.
//
// A thread block processes 64 rows of the cache at a time. Its first warpgroup, the scorer, multiplies the queries with
// the rows and turns scores into weights; the queries stay in its registers. The other two warpgroups, the adders,
// multiply the weights with one half of the values each, and keep the sums in their registers. Rows go through a ring
// of three stages in shared memory; the adders refill a stage as soon as they have used it. The last tile of a row is
// not a value; the weights overwrite it once the scores are computed.
//
// For 64 rows the tensor cores need 1,150 clocks for the scores and 1,020 for the sums; computing the weights takes
// about 900 clocks without tensor cores. To keep the tensor cores busy during that time, the scorer hands weights over
// late, when it is halfway through the scores of the next rows. So the adders multiply while the scorer computes the
// next weights.
//
// `Rows` are the rows of the cache that a block reads: rows[i] is the number of row i, -1 for none; rows.mask(block,
// scores) sets the scores of rows that a query does not see to minus infinity.
//
// Constants: PAGE_SIZE, HALF (see hopper.cuh).

#include "hopper.cuh"
#include "online_softmax.cuh"
#include "warps.cuh"

namespace {

constexpr int kHeads = 64;      // query rows of a block
constexpr int kBlockRows = 64;  // rows that are multiplied together
constexpr int kTiles = 9;       // of 64 elements, in a row
constexpr int kValueTiles = 8;
constexpr int kFirstTiles = 4;  // multiplied before the others have arrived
constexpr int kTileBytes = kBlockRows * 128;
constexpr int kStages = 3;
constexpr int kStageBytes = kTiles * kTileBytes;
constexpr int kWeights = kValueTiles * kTileBytes;  // offset of the weights in a stage: the last tile
constexpr int kQueryStage = kStages - 1;            // the stage that holds the query until it is in registers
constexpr int kRegisterSteps = 4 * kValueTiles - 1;  // steps of 16 query elements that fit in registers
constexpr int kThreads = 3 * 128;
constexpr int kScorerRegisters = 184, kAdderRegisters = 160;  // of a thread; 3 * 168 together
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
static_assert(sizeof(Shared) <= 232448, "what a block can have");

struct Pages {
    const char* start;
    long long page_bytes, slot_bytes;

    __device__ const char* row(int number) const {
        return start + number / PAGE_SIZE * page_bytes + number % PAGE_SIZE * slot_bytes;
    }
};

// A position in the ring of stages; `phase` is the parity of the barriers' phase.
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
// The first of the two heads of a thread; the second is first_head() + 8.
__device__ __forceinline__ int first_head() { return 16 * warp_in_group() + lane() / 4; }

__device__ __forceinline__ void init_barriers(Shared& shared) {
    for (int stage = 0; stage < kStages; ++stage) {
        init_barrier(shared_address(&shared.first_fetched[stage]), 256);
        init_barrier(shared_address(&shared.all_fetched[stage]), 256);
        init_barrier(shared_address(&shared.weighted[stage]), 4);
    }
    init_barrier(shared_address(&shared.query_read), 4);
    fence_barriers();
}

// The adders fetch 64 rows; missing rows become zeros.
template <typename Rows>
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

// The scorer starts to copy `lines` query rows, `line_bytes` apart: their last tile to query_rest, the other tiles to
// the query's stage.
__device__ __forceinline__ void fetch_query(Shared& shared, const char* query, long long line_bytes, int lines) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = thread_in_group() / 8 + 16 * i, word = threadIdx.x % 8;
        const bool exists = line < lines;
        const char* const from = query + (exists ? line : 0) * line_bytes + word * 16;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const unsigned to = tile < kValueTiles ? shared_address(shared.stages[kQueryStage]) + tile * kTileBytes
                                                   : shared_address(shared.query_rest);
            copy_16_async(to + word_in_tile(line, word), from + tile * 128, exists);
        }
    }
}

// The line of a lane in its warp's matrices of 16 heads x 16 elements: lane l has the address of half l / 16 of line
// l % 16.
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

// Computes scores [64 heads, 64 rows]; halfway, hands the weights of the previous rows to the adders.
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

template <typename Rows>
__device__ __forceinline__ void score(Shared& shared, const Rows& rows, int blocks,
                                      const unsigned (&query)[kRegisterSteps][4], float scale) {
    Softmax<32> softmax;
    float scores[32];
    Turn turn;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        multiply_query(shared, query, turn, scores, block > 0);
        rows.mask(block, scores);
        float shrink[2];
        const bool any = softmax.weigh(scores, scale, shrink) && block > 0;  // the first block has no earlier sums
        if (any && lane() % 4 == 0) {
            shared.shrink[turn.stage][first_head()] = shrink[0];
            shared.shrink[turn.stage][first_head() + 8] = shrink[1];
        }
        if (lane() == 0) shared.any_shrinks[turn.stage][warp_in_group()] = any;
        sync_threads<kScorer, 128>();  // all products with the last tile have ended
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

// Computes sums [64 heads, 256 columns] of one half of the values.
template <typename Rows>
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
        sync_threads<kAdders, 256>();  // all products with this stage have ended
        if (block + kStages < blocks) fetch(shared, rows, pages, block + kStages, turn.stage);
        turn.next();
    }
}

// Rounds a warp's 16 query rows x 2 * SUMS columns, and stores the first `lines` of them through shared memory, in
// whole sectors.
template <int SUMS>
__device__ __forceinline__ void store(const float* sums, unsigned char* staging, char* out, int lines) {
    constexpr int kLineBytes = 4 * SUMS, kPitch = kLineBytes + 16, kLineWords = kLineBytes / 16;
    const unsigned to = shared_address(staging) + lane() % 16 * kPitch + lane() / 16 * 16;
#pragma unroll
    for (int i = 0; i < SUMS; i += 8) {
        const unsigned words[4] = {round_pair(sums[i], sums[i + 1]), round_pair(sums[i + 2], sums[i + 3]),
                                   round_pair(sums[i + 4], sums[i + 5]), round_pair(sums[i + 6], sums[i + 7])};
        store_matrices(to + i * 4, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane(); i < 16 * kLineWords; i += 32) {
        const int line = i / kLineWords, word = i % kLineWords;
        if (line >= lines) break;
        *reinterpret_cast<uint4*>(out + line * 1024 + word * 16) =
            *reinterpret_cast<const uint4*>(staging + line * kPitch + word * 16);
    }
}

}  // namespace
