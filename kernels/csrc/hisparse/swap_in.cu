// Swap-in for sparse attention; kernels/hisparse/swap_in.py defines the result, and tests compare it with torch.
//
// The first `batch` thread blocks plan one batch row each. Hits are found through the inverse table, so a plan costs
// one pass over TOP_K and one over the eviction order. The other blocks copy. They wait for the plans: `signals[t]` is
// the number of misses (plus one) that batch row t leaves for them. So that PCIe is not idle during that time, every
// warp of a planning block except the first fetches one of the first missing tokens before the plan is made
// (`fetch_early`); these come last in the list of misses. Data that no other block waits for is written after the
// signal.
//
// Copying blocks always get their signals: there are fewer of them than multiprocessors, so planning blocks can run,
// and planning blocks wait for no other block. Signals are zero between calls.
//
// Constants: TOP_K, HOT_ROWS, PAGE_SIZE, ROW_BYTES, THREADS, BUCKET_BITS (2^BUCKET_BITS >= 2 * TOP_K).

#include "hisparse/copy_misses.cuh"
#include "overlap.cuh"

constexpr int SLOTS = HOT_ROWS + 1;
constexpr int WARPS = THREADS / 32;
constexpr int SELECTED = (TOP_K + THREADS - 1) / THREADS;    // entries of top-k per thread, consecutive
constexpr int ORDERED = (HOT_ROWS + THREADS - 1) / THREADS;  // entries of the eviction order per thread, consecutive
constexpr int BUFFER_PAGES = HOT_ROWS / PAGE_SIZE + 1;
constexpr int BUCKETS = 1 << BUCKET_BITS;
constexpr int EMPTY = 0x7fffffff;
constexpr int EARLY = WARPS - 1;  // missing tokens fetched early; not by warp 0, whose signal's memory fence would wait
static_assert(THREADS % 32 == 0 && WARPS <= 32, "whole warps, and one warp scans the sums of all");
static_assert(BUCKETS >= 2 * TOP_K && HOT_ROWS >= TOP_K && HOT_ROWS < 32768, "see check_geometry");

// kernels/hisparse/slot_tables.py adds up the same fields: plan_shared_bytes.
struct Shared {
    int first_of[BUCKETS];  // hash table of missing tokens: first index in top-k; later the rank among the misses
    int tokens[TOP_K];
    unsigned warp_sums[32];
    int found_counts[32];  // missing tokens of each warp, duplicates included
    int found[32][32];     // and the host rows of the first of them
    int early_ranks[32];   // rank, among the misses, of each early fetch; -1 for a duplicate
    int pages[BUFFER_PAGES];  // of the hot pool
    short victims[TOP_K];     // the slot that takes the n-th miss
    unsigned char used[SLOTS];

    __device__ int row_of(int slot) const { return pages[slot / PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE; }
};

// The bucket of tokens[index], shared by its duplicates; keeps the smallest index.
__device__ int insert(Shared& shared, int token, int index) {
    unsigned bucket = (static_cast<unsigned>(token) * 2654435769u) >> (32 - BUCKET_BITS);
    while (true) {
        const int seen = atomicCAS(&shared.first_of[bucket], EMPTY, index);
        if (seen == EMPTY) return bucket;
        if (shared.tokens[seen] == token) {
            atomicMin(&shared.first_of[bucket], index);
            return bucket;
        }
        bucket = (bucket + 1) % BUCKETS;
    }
}

// Sum of `value` over all lower threads; `total` over all. Has one barrier.
__device__ unsigned exclusive_block_scan(Shared& shared, unsigned value, unsigned& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned inclusive = inclusive_warp_scan(value);
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    const unsigned sums = inclusive_warp_scan(lane < WARPS ? shared.warp_sums[lane] : 0);
    total = __shfl_sync(~0u, sums, 31);
    const unsigned lower_warps = __shfl_sync(~0u, sums, warp > 0 ? warp - 1 : 0);
    return inclusive - value + (warp > 0 ? lower_warps : 0);
}

// One row held in a warp's registers between its load and its store; of whole, aligned 16-byte words only.
struct RowInFlight {
    static constexpr int WORDS = ROW_BYTES / 16;
    static constexpr int PASSES = ROW_BYTES > 2048 ? 1 : (WORDS + 31) / 32 + !WORDS;
    uint4 words[PASSES];

    __device__ void load(const char* from, int lane) {
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            if (lane + 32 * i < WORDS) words[i] = __ldcs(reinterpret_cast<const uint4*>(from) + lane + 32 * i);
    }
    __device__ void store(char* to, int lane) const {
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            if (lane + 32 * i < WORDS) __stcg(reinterpret_cast<uint4*>(to) + lane + 32 * i, words[i]);
    }
};

__device__ void signal(int* address, int value) {
    __threadfence();
    *reinterpret_cast<volatile int*>(address) = value;
}

__device__ int await_signal(const int* address) {
    int value;
    while ((value = *reinterpret_cast<const volatile int*>(address)) == 0) __nanosleep(20);
    __threadfence();
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
swap_in(const int* top_k, long long top_k_stride, const int* requests, const int* seq_lens, const int* capacity,
        const int* hot_pages, long long hot_pages_stride, int* slot_tokens, long long slot_tokens_stride,
        short* token_slots, long long token_slots_stride, short* eviction_order, long long eviction_order_stride,
        unsigned long long* lookups, const int* host_pages, long long host_pages_stride, int* __restrict__ rows,
        int* miss_sources, int* miss_rows, int* __restrict__ miss_counts, int* signals, long long batch,
        const char* host, long long host_page_stride, long long host_token_stride, char* hot,
        long long hot_page_stride, long long hot_token_stride, long long fetch_early) {
    wait_for_previous();
    extern __shared__ __align__(16) char dynamic[];
    const Pools pools{host, host_page_stride, host_token_stride, hot, hot_page_stride, hot_token_stride};
    if (blockIdx.x >= batch) {
        const int block = blockIdx.x - batch, blocks = gridDim.x - batch;
        const bool last = copy_misses_of_batch(pools, miss_sources, miss_rows, batch, block, blocks,
                                               reinterpret_cast<int*>(dynamic), signals + batch,
                                               [=](int row) { return await_signal(signals + row) - 1; });
        if (last)
            for (int row = threadIdx.x; row < batch; row += THREADS) signals[row] = 0;
        return;
    }

    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const long long row = blockIdx.x;
    top_k += row * top_k_stride;
    rows += row * TOP_K;
    miss_sources += row * TOP_K;
    miss_rows += row * TOP_K;

    int token[SELECTED];
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        const int index = thread * SELECTED + s;
        token[s] = index < TOP_K ? top_k[index] : -1;
    }
    const int request = requests[row];
    const int seq_len = seq_lens[row];
    hot_pages += request * hot_pages_stride;
    slot_tokens += request * slot_tokens_stride;
    token_slots += request * token_slots_stride;
    eviction_order += request * eviction_order_stride;
    host_pages += row * host_pages_stride;

    // The plan's loads from memory are in flight together while shared memory is cleared. A fully resident row does not
    // need them, but finding that out takes as long.
    const bool resident = seq_len <= capacity[request];
    const int newest = seq_len - 1;
    const int reserved = eviction_order[HOT_ROWS];
    short order[ORDERED];
#pragma unroll
    for (int o = 0; o < ORDERED; o++) {
        const int index = thread * ORDERED + o;
        order[o] = index < HOT_ROWS ? eviction_order[index] : 0;
    }
    short slot[SELECTED];
    int source[SELECTED];  // host rows
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        const bool valid = token[s] >= 0 && token[s] < seq_len;
        const bool wanted = valid && token[s] != newest;
        token[s] = valid ? token[s] : -1;
        slot[s] = wanted ? token_slots[token[s]] : 0;
        source[s] = wanted ? host_pages[token[s] / PAGE_SIZE] * PAGE_SIZE + token[s] % PAGE_SIZE : 0;
    }
    for (int i = thread; i < BUCKETS; i += THREADS) shared.first_of[i] = EMPTY;
    for (int i = thread; i < SLOTS; i += THREADS) shared.used[i] = 0;
#pragma unroll
    for (int s = 0; s < SELECTED; s++)
        if (thread * SELECTED + s < TOP_K) shared.tokens[thread * SELECTED + s] = token[s];
    if (resident) {  // token p in slot p
#pragma unroll
        for (int s = 0; s < SELECTED; s++) {
            const int index = thread * SELECTED + s;
            if (index < TOP_K)
                rows[index] = token[s] < 0 ? -1 : hot_pages[token[s] / PAGE_SIZE] * PAGE_SIZE + token[s] % PAGE_SIZE;
        }
        if (thread == 0) {
            miss_counts[row] = 0;
            signal(signals + row, 1);
        }
        return;
    }

    // Missing tokens in the order of top-k, duplicates included: the n-th is fetched by warp n + 1.
    unsigned missing = 0;
#pragma unroll
    for (int s = 0; s < SELECTED; s++) missing += slot[s] < 0;
    const unsigned found = inclusive_warp_scan(missing);
    int place = found - missing;  // in the warp, of this thread's first
    if (lane == 31) shared.found_counts[warp] = found;
#pragma unroll
    for (int s = 0, at = place; s < SELECTED; s++)
        if (slot[s] < 0 && at < 32) shared.found[warp][at++] = source[s];
    for (int i = thread; i < BUFFER_PAGES; i += THREADS) shared.pages[i] = hot_pages[i];
    __syncthreads();
    const unsigned found_here = lane < WARPS ? shared.found_counts[lane] : 0;
    const unsigned found_up_to = inclusive_warp_scan(found_here);
    place += __shfl_sync(~0u, found_up_to - found_here, warp);
    const unsigned finders = __ballot_sync(~0u, found_up_to >= static_cast<unsigned>(warp));
    const bool fetches = fetch_early && warp > 0 && finders;
    RowInFlight row_in_flight;
    if (fetches) {
        const int finder = __ffs(finders) - 1;
        const int before = __shfl_sync(~0u, found_up_to - found_here, finder);
        row_in_flight.load(pools.source(shared.found[finder][warp - 1 - before]), lane);
    }

    // Mark the slots of hits; find the first of each missing token.
    int bucket[SELECTED];
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        bucket[s] = -1;
        if (token[s] < 0 || token[s] == newest) continue;
        if (slot[s] >= 0)
            shared.used[slot[s]] = 1;
        else
            bucket[s] = insert(shared, token[s], thread * SELECTED + s);
    }
    int held[ORDERED];  // the token in each slot; needed at the end only
#pragma unroll
    for (int o = 0; o < ORDERED; o++) held[o] = slot_tokens[order[o]];
    __syncthreads();

    // Rank misses in the order of top-k and hits in the order of eviction: two counts of 16 bits in one scan.
    unsigned counts = 0;
    bool first[SELECTED];
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        first[s] = bucket[s] >= 0 && shared.first_of[bucket[s]] == thread * SELECTED + s;
        counts += first[s] ? 1u << 16 : 0;
    }
    bool hit[ORDERED];
#pragma unroll
    for (int o = 0; o < ORDERED; o++) {
        hit[o] = thread * ORDERED + o < HOT_ROWS && shared.used[order[o]];
        counts += hit[o];
    }
    unsigned totals;
    counts = exclusive_block_scan(shared, counts, totals);
    const int misses = totals >> 16, stale = HOT_ROWS - (totals & 0xffff);

    // In eviction order, the first slots that are not hit take the misses.
    int miss_rank = counts >> 16, hits_before = counts & 0xffff;
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        if (bucket[s] < 0) continue;
        if (place < EARLY) shared.early_ranks[place] = first[s] ? miss_rank : -1;
        place++;
        if (first[s]) shared.first_of[bucket[s]] = miss_rank++;
    }
#pragma unroll
    for (int o = 0; o < ORDERED; o++) {
        const int rank = thread * ORDERED + o - hits_before;
        if (thread * ORDERED + o < HOT_ROWS && !hit[o] && rank < misses) shared.victims[rank] = order[o];
        hits_before += hit[o];
    }
    __syncthreads();

    // The list of misses; the first ones, which were fetched early, come last.
    const int candidates = fetch_early ? min(EARLY, __shfl_sync(~0u, found_up_to, 31)) : 0;
    const int early = __popc(__ballot_sync(~0u, lane < candidates && shared.early_ranks[lane] >= 0));
#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        if (!first[s]) continue;
        const int rank = shared.first_of[bucket[s]];
        const int at = rank - early + (rank < early ? misses : 0);
        miss_sources[at] = source[s];
        miss_rows[at] = shared.row_of(shared.victims[rank]);
    }
    __syncthreads();
    if (thread == 0) signal(signals + row, misses - early + 1);

#pragma unroll
    for (int s = 0; s < SELECTED; s++) {
        const int index = thread * SELECTED + s;
        if (index >= TOP_K) continue;
        int at = token[s] == newest ? reserved : slot[s];
        if (bucket[s] >= 0) {
            const int rank = shared.first_of[bucket[s]];
            at = shared.victims[rank];
            if (first[s]) {
                const bool vacated = rank == 0 && stale == misses;  // every slot was used: this one is vacated, too
                slot_tokens[at] = vacated ? -1 : token[s];
                if (!vacated) token_slots[token[s]] = at;
            }
        }
        rows[index] = token[s] < 0 ? -1 : shared.row_of(at);
    }
    // The new order: stale slots that stay, loaded ones, hits, the newest token's. The first of them is vacated and
    // becomes the slot of the next token: it goes to the end.
    hits_before = counts & 0xffff;
#pragma unroll
    for (int o = 0; o < ORDERED; o++) {
        const int index = thread * ORDERED + o;
        if (index >= HOT_ROWS) continue;
        const int rank = index - hits_before;
        const bool victim = !hit[o] && rank < misses;
        const int position = hit[o] ? stale + hits_before : victim ? stale - misses + rank : rank - misses;
        hits_before += hit[o];
        if ((victim || position == 0) && held[o] >= 0) token_slots[held[o]] = -1;
        if (!victim && position == 0) slot_tokens[order[o]] = -1;
        eviction_order[position > 0 ? position - 1 : HOT_ROWS] = order[o];
    }
    if (thread == 0) {
        miss_counts[row] = misses;
        eviction_order[HOT_ROWS - 1] = reserved;
        slot_tokens[reserved] = newest;
        token_slots[newest] = reserved;
        atomicAdd(lookups, static_cast<unsigned long long>(HOT_ROWS - stale));
        atomicAdd(lookups + 1, static_cast<unsigned long long>(misses));
    }
    const int early_rank = fetches ? shared.early_ranks[warp - 1] : -1;
    if (early_rank >= 0) row_in_flight.store(pools.destination(shared.row_of(shared.victims[early_rank])), lane);
}
