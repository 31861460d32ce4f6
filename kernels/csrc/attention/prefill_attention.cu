// Causal attention of tiles of 128 queries over keys and values that were copied out of their pages; see
// kernels/attention/paged_prefill_cuda.py.
//
// A thread block processes tiles (128 queries of one sequence, one query head) one after another. One thread of its
// first warpgroup, the producer, copies blocks of 128 keys and of 128 values into two rings in shared memory. Each of
// the other two warpgroups, the consumers, computes 64 of the queries. A consumer starts two products: the scores of a
// block, and the weights of the previous block times its values. It computes the softmax of the scores while the second
// product runs.
//
// Blocks are processed from the last key to the first, so only the first one or two need a mask.
//
// Constants: HALF (see hopper.cuh), GROUP, the query heads of a KV head.

#include "hopper.cuh"
#include "online_softmax.cuh"
#include "warps.cuh"

namespace {

constexpr int kDim = 128;
constexpr int kTileQueries = 128;
constexpr int kQueries = 64;  // of a consumer
constexpr int kBlockTokens = 128;
constexpr int kHalfBytes = kBlockTokens * 128;   // 128 lines of 64 elements
constexpr int kBlockBytes = 2 * kHalfBytes;      // of keys, or of values
constexpr int kQueryBytes = 2 * kQueries * 128;  // of a consumer: two halves of 64 lines
constexpr int kStages = 2;
constexpr int kThreads = 3 * 128;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // of a thread; 3 * 168 together
enum { kAllThreads, kConsumer, kTurn = kConsumer + 2 };  // barriers of sync_threads; + i for consumer i

struct Shared {
    unsigned char keys[kStages][kBlockBytes];
    unsigned char values[kStages][kBlockBytes];
    unsigned char query[2][kQueryBytes];
    unsigned long long keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
};

// A position in a ring of stages; `phase` is the parity of the barriers' phase.
struct Turn {
    int stage = 0;
    unsigned phase = 0;

    __device__ void next() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The items of this block. All items are sorted by their work, largest first. Every other round assigns them to the
// blocks in reverse order, so that all blocks get about the same work.
struct Items {
    const long long count;
    long long first = 0;
    bool backwards = false;

    __device__ explicit Items(long long count) : count(count) {}
    __device__ long long item() const { return first + (backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }
    __device__ bool valid() const { return first < count; }  // the round has items; item() may still be too large
    __device__ void next() {
        first += gridDim.x;
        backwards = !backwards;
    }
};

struct Plan {  // see attention_plan.WorkPlan
    const int *kv_lens, *query_lens, *row_starts, *tiles, *copy_starts;
    long long tiles_stride, copied_tokens;
};

struct Tile {
    int head;
    int first_query;  // of the tile, in its sequence
    int query_len;
    int first_position;  // of first_query
    int first_key;       // of its keys
    int blocks;          // of keys; 0 for an empty tile
    int part;            // -1 if it is not divided
    long long row;       // of first_query
    long long first_block;  // in the copy

    __device__ __forceinline__ Tile(const Plan& plan, long long item, long long items, int heads) {
        blocks = 0;
        if (item >= items) return;
        head = static_cast<int>(item % heads);
        const int* const tile = plan.tiles + item / heads;
        const int sequence = tile[0];
        first_query = tile[plan.tiles_stride];
        query_len = plan.query_lens[sequence];
        const int kv_len = plan.kv_lens[sequence];
        first_position = kv_len - query_len + first_query;
        row = static_cast<long long>(plan.row_starts[sequence]) + first_query;
        const int first = tile[2 * plan.tiles_stride];
        first_key = first * kBlockTokens;
        part = tile[4 * plan.tiles_stride];
        const long long first_token = static_cast<long long>(head / GROUP) * plan.copied_tokens;
        first_block = (first_token + plan.copy_starts[sequence]) / kBlockTokens + first;
        if (first_query < query_len) blocks = tile[3 * plan.tiles_stride] - first;
    }
};

__device__ __forceinline__ int warp_in_group() { return threadIdx.x % 128 / 32; }
// The first of the two queries of a thread; the second is own_query() + 8.
__device__ __forceinline__ int own_query() { return 16 * warp_in_group() + lane() / 4; }

__device__ __forceinline__ void produce(Shared& shared, const Plan& plan, const char* keys, const char* values,
                                        long long items, int heads) {
    Turn key_turn, value_turn;
    const auto copy = [&](unsigned char (&to)[kStages][kBlockBytes], unsigned long long* full,
                          unsigned long long* empty, Turn& turn, const char* from) {
        wait_phase(shared_address(&empty[turn.stage]), turn.phase ^ 1);
        const unsigned barrier = shared_address(&full[turn.stage]);
        expect_bytes(barrier, kBlockBytes);
        copy_bulk_async(shared_address(to[turn.stage]), from, kBlockBytes, barrier);
        turn.next();
    };
    for (Items at(items); at.valid(); at.next()) {
        const Tile tile(plan, at.item(), items, heads);
        for (int block = tile.blocks - 1; block >= 0; --block) {
            const long long from = (tile.first_block + block) * kBlockBytes;
            copy(shared.keys, shared.keys_full, shared.keys_empty, key_turn, keys + from);
            if (block + 1 < tile.blocks) {
                copy(shared.values, shared.values_full, shared.values_empty, value_turn, values + from + kBlockBytes);
            }
        }
        if (tile.blocks > 0) {
            copy(shared.values, shared.values_full, shared.values_empty, value_turn,
                 values + tile.first_block * kBlockBytes);
        }
    }
}

// Masks the scores of keys after the query. `first_key` is the first key of the block, `position` the position of the
// thread's first query.
__device__ __forceinline__ void mask(float (&scores)[64], int first_key, int position) {
    const int visible = position - first_key - lane() % 4 * 2;  // of the thread's first column
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (column > visible + i % 4 / 2 * 8) scores[i] = -__int_as_float(0x7f800000);
    }
}

// The weights as the first operand of products with values: 8 steps of 16 keys.
__device__ __forceinline__ void pack(const float (&weights)[64], unsigned (&packed)[8][4]) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[step][i] = round_pair(weights[8 * step + 2 * i], weights[8 * step + 2 * i + 1]);
        }
    }
}

// A consumer, which computes one half of a tile.
struct Consumer {
    Shared& shared;
    const int number;
    const float scale;
    Turn key_turn, value_turn;

    // Starts scores [64 queries, 128 keys].
    __device__ __forceinline__ void start_scores(float (&scores)[64]) {
        wait_phase(shared_address(&shared.keys_full[key_turn.stage]), key_turn.phase);
        const unsigned long long query = tile_operand(shared_address(shared.query[number]));
        const unsigned long long keys = tile_operand(shared_address(shared.keys[key_turn.stage]));
        begin_products(scores);
#pragma unroll
        for (int step = 0; step < 8; ++step) {  // of 16 elements
            multiply_64x128(scores, query + (step / 4 * (kQueryBytes / 2) + step % 4 * 32) / 16,
                            keys + (step / 4 * kHalfBytes + step % 4 * 32) / 16, step > 0);
        }
        commit_products();
    }

    // Starts sums [64 queries, 128 elements] += weights * values.
    __device__ __forceinline__ void start_sums(float (&sums)[64], const unsigned (&weights)[8][4]) {
        wait_phase(shared_address(&shared.values_full[value_turn.stage]), value_turn.phase);
        const unsigned long long values = tile_operand(shared_address(shared.values[value_turn.stage]), kHalfBytes);
        begin_products(sums);
#pragma unroll
        for (int step = 0; step < 8; ++step) multiply_64x128(sums, weights[step], values + step * 16 * 128 / 16);
        commit_products();
    }

    __device__ __forceinline__ void release(unsigned long long* empty, Turn& turn) {
        if (lane() == 0) arrive(shared_address(&empty[turn.stage]));
        turn.next();
    }

    __device__ __forceinline__ void attend(const Tile& tile, float (&sums)[64], Softmax<64>& softmax, bool in_turn) {
        const int first_position = tile.first_position + number * kQueries;  // of this half of the tile
        const int position = first_position + own_query();
        float scores[64], shrink[2];
        unsigned weights[8][4];
        start_scores(scores);
        finish_products(scores);
        release(shared.keys_empty, key_turn);
        mask(scores, tile.first_key + (tile.blocks - 1) * kBlockTokens, position);
        softmax.weigh(scores, scale, shrink);  // there are no earlier sums
        pack(scores, weights);
#pragma unroll 1
        for (int block = tile.blocks - 2; block >= 0; --block) {
            if (in_turn) wait_turn();
            start_scores(scores);
            start_sums(sums, weights);
            if (in_turn) end_turn();
            wait_for_first_products();
            hold(scores);
            release(shared.keys_empty, key_turn);
            const int first_key = tile.first_key + block * kBlockTokens;
            if (first_key + kBlockTokens - 1 > first_position) mask(scores, first_key, position);
            const bool shrinks = softmax.weigh(scores, scale, shrink);
            finish_products(sums);
            release(shared.values_empty, value_turn);
            if (shrinks) {
#pragma unroll
                for (int i = 0; i < 64; ++i) sums[i] *= shrink[i % 4 / 2];
            }
            pack(scores, weights);
        }
        start_sums(sums, weights);
        finish_products(sums);
        release(shared.values_empty, value_turn);
    }

    // Consumers start their products in turn, so that one computes its softmax while the products of the other run.
    __device__ __forceinline__ void wait_turn() {
        if (number == 0) {
            sync_threads<kTurn, 256>();
        } else {
            sync_threads<kTurn + 1, 256>();
        }
    }
    __device__ __forceinline__ void end_turn() {
        if (number == 0) {
            arrive_threads<kTurn + 1, 256>();
        } else {
            arrive_threads<kTurn, 256>();
        }
    }

    // Releases all stages without computing: this half of the tile has no queries.
    __device__ __forceinline__ void skip(const Tile& tile) {
        for (int block = 0; block < tile.blocks; ++block) {
            wait_phase(shared_address(&shared.keys_full[key_turn.stage]), key_turn.phase);
            release(shared.keys_empty, key_turn);
            wait_phase(shared_address(&shared.values_full[value_turn.stage]), value_turn.phase);
            release(shared.values_empty, value_turn);
        }
    }

    __device__ __forceinline__ void sync() {
        if (number == 0) {
            sync_threads<kConsumer, 128>();
        } else {
            sync_threads<kConsumer + 1, 128>();
        }
    }

    // Loads 64 lines of 256 bytes, `pitch` bytes apart; lines from `count` on become zeros.
    __device__ __forceinline__ void load_query(const char* from, long long pitch, int count) {
        const unsigned to = shared_address(shared.query[number]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int word = threadIdx.x % 16, line = threadIdx.x % 128 / 16 + 8 * i;
            const unsigned place = word / 8 * (kQueryBytes / 2) + word_in_tile(line, word % 8);
            copy_16_async(to + place, from + min(line, count - 1) * pitch + word * 16, line < count);
        }
        wait_for_copies();
        fence_async();
        sync();
    }

    // Computes the sum of all weights for each of the thread's two queries.
    __device__ __forceinline__ void add_weights(const Softmax<64>& softmax, float (&total)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] = softmax.sum[i] + __shfl_xor_sync(kAll, softmax.sum[i], 1);
            total[i] += __shfl_xor_sync(kAll, total[i], 2);
        }
    }

    // Stores the results of a part, 64 lines of 128 elements, and their log-sums; -inf for queries that see none of its
    // keys.
    __device__ __forceinline__ void store_part(const float (&sums)[64], const Softmax<64>& softmax, float* partial,
                                               float* log_sums) {
        float total[2];
        add_weights(softmax, total);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int line = own_query() + 8 * i;
            const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
            if (lane() % 4 == 0) {
                log_sums[line] = total[i] > 0.0f ? softmax.reference[i] + log2f(total[i]) : -__int_as_float(0x7f800000);
            }
#pragma unroll
            for (int column = 0; column < 16; ++column) {
                const float2 pair = {sums[4 * column + 2 * i] * inverse, sums[4 * column + 2 * i + 1] * inverse};
                *reinterpret_cast<float2*>(partial + line * kDim + column * 8 + lane() % 4 * 2) = pair;
            }
        }
        sync();  // all products with this query have ended: the next one may be loaded
    }

    // Rounds the sums and stores the first `count` lines of 256 bytes, `pitch` bytes apart. The query is overwritten.
    __device__ __forceinline__ void store(const float (&sums)[64], const Softmax<64>& softmax, char* to,
                                          long long pitch, int count) {
        float total[2];
        add_weights(softmax, total);
        const float inverse[2] = {1.0f / total[0], 1.0f / total[1]};
        sync();  // all products with the query have ended
        const unsigned staging = shared_address(shared.query[number]);
        const int line = 16 * warp_in_group() + lane() % 16;
#pragma unroll
        for (int step = 0; step < 8; ++step) {  // of 16 elements
            const float* const own = sums + 8 * step;
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = round_pair(own[2 * i] * inverse[i % 2], own[2 * i + 1] * inverse[i % 2]);
            }
            const unsigned place = word_in_tile(line, step % 4 * 2 + lane() / 16);
            store_matrices(staging + step / 4 * (kQueryBytes / 2) + place, words);
        }
        __syncwarp();
        const unsigned char* const query = shared.query[number];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // a warp's own 16 lines
            const int word = lane() % 16, own_line = 16 * warp_in_group() + lane() / 16 + 2 * i;
            const unsigned place = word / 8 * (kQueryBytes / 2) + word_in_tile(own_line, word % 8);
            if (own_line < count) {
                *reinterpret_cast<uint4*>(to + own_line * pitch + word * 16) =
                    *reinterpret_cast<const uint4*>(query + place);
            }
        }
        sync();  // the next query may be loaded
    }
};

}  // namespace

// query [tokens, heads, 128] with rows of `query_pitch` bytes, out [tokens, heads, 128]; counts[0] tiles. Results of
// parts: partial [parts, heads, 128, 128], log_sums [parts, heads, 128].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
prefill_attention(const char* query, long long query_pitch, const char* keys, const char* values, const int* kv_lens,
                  const int* query_lens, const int* row_starts, const int* tiles, long long tiles_stride,
                  const int* copy_starts, long long copied_tokens, const int* counts, long long scale_bits,
                  float* partial, float* log_sums, char* out, long long heads) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&shared.keys_full[stage]), 1);
            init_barrier(shared_address(&shared.values_full[stage]), 1);
            init_barrier(shared_address(&shared.keys_empty[stage]), 8);  // warps
            init_barrier(shared_address(&shared.values_empty[stage]), 8);
        }
        fence_barriers();
    }
    __syncthreads();
    start_next();
    wait_for_previous();

    const Plan plan = {kv_lens, query_lens, row_starts, tiles, copy_starts, tiles_stride, copied_tokens};
    const int num_heads = static_cast<int>(heads);
    const long long items = counts[0] * heads;
    if (threadIdx.x < 128) {
        give_registers<kProducerRegisters>();
        if (threadIdx.x == 0) produce(shared, plan, keys, values, items, num_heads);
        return;
    }
    take_registers<kConsumerRegisters>();
    Consumer consumer = {shared, static_cast<int>(threadIdx.x) / 128 - 1, __int_as_float(static_cast<int>(scale_bits))};
    if (consumer.number == 1) consumer.end_turn();  // the first turn is that of consumer 0
    for (Items at(items); at.valid(); at.next()) {
        const Tile tile(plan, at.item(), items, num_heads);
        if (tile.blocks == 0) continue;
        const int count = min(tile.query_len - tile.first_query - consumer.number * kQueries, kQueries);
        if (count <= 0) {
            consumer.skip(tile);
            continue;
        }
        const long long row = tile.row + consumer.number * kQueries;
        consumer.load_query(query + row * query_pitch + tile.head * kDim * 2, query_pitch, count);
        float sums[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
        Softmax<64> softmax;
        consumer.attend(tile, sums, softmax, tile.query_len - tile.first_query > kQueries);
        if (tile.part < 0) {
            consumer.store(sums, softmax, out + (row * heads + tile.head) * kDim * 2, heads * kDim * 2, count);
        } else {
            const long long line = (tile.part * heads + tile.head) * kTileQueries + consumer.number * kQueries;
            consumer.store_part(sums, softmax, partial + line * kDim, log_sums + line);
        }
    }
}
