// The k largest of each row of scores, by position or, with PAGE, by flat row of a pool: the second half of
// index_topk.py.
//
// A cluster of CLUSTER thread blocks processes one row. This is a radix select: floats are mapped to unsigned keys of
// the same order, and the k-th largest key is found digit by digit from the top (11, 11 and 10 bits). A histogram of
// the keys that share the digits known so far gives the next digit. Every block counts its part of the row and adds up
// the histograms of all blocks. At the end the positions of the larger keys, and of as many equal ones as needed, are
// written in order. A row that fits in the registers of the cluster is read once; a longer row is read again for every
// digit, from the L2 cache.
//
// Constants: THREADS; CLUSTER; PAGE, tokens of a page, or 0 for positions.

#include "overlap.cuh"

namespace {

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = CLUSTER;
constexpr int kQuads = 4;  // float4 values per thread and round
constexpr int kRoundQuads = kBlocks * kThreads * kQuads;
constexpr int kDigits = 3;
constexpr int kBins = 2 * kThreads;  // of the longest digit
constexpr unsigned kAll = 0xffffffffu;
static_assert(kThreads == 1024, "2048 bins, two per thread; 32 warps, one per lane");

struct Shared {
    unsigned histograms[kDigits][kBins];
    unsigned counts[2];  // of selected keys in a round; double-buffered, to write the next while others read
    unsigned warp_sums[kWarps];
    unsigned found_bin, found_needed, found_count;
};

__device__ int block_rank() {
#if CLUSTER > 1
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}

// Barrier of the cluster: all threads then see what the others have written.
__device__ void sync_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The shared memory of another block of the cluster.
__device__ const Shared* shared_of(const Shared* mine, int rank) {
#if CLUSTER > 1
    const Shared* theirs;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
    return theirs;
#else
    return mine;
#endif
}

// The number to write for a position; `pages` are the pages of the row's sequence.
__device__ int result(const int* pages, int position) {
#if PAGE
    return pages[position / PAGE] * PAGE + position % PAGE;
#else
    return position;
#endif
}

// A larger score has a larger key; 0 and -0 have the same key. No score has the key 0.
__device__ unsigned key_of(float score) {
    const int bits = __float_as_int(score + 0.0f);
    return static_cast<unsigned>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u)));
}

struct Keys {
    unsigned key[4 * kQuads];
};

// Loads adjacent keys from position `first` on; keys from position n on are 0.
__device__ Keys load_keys(const float* scores, int first, int n) {
    Keys keys;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        const int position = first + 4 * q;
        const float4 four = position < n ? *reinterpret_cast<const float4*>(scores + position) : float4{};
        const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) keys.key[4 * q + i] = position + i < n ? key_of(each[i]) : 0;
    }
    return keys;
}

// Exclusive prefix sum over the threads of the block; the sum of all goes to `total`.
__device__ unsigned sum_before(unsigned mine, unsigned* warp_sums, unsigned& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(kAll, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    unsigned of_warps = warp_sums[lane];  // every warp sums all warps: this saves a barrier
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(kAll, of_warps, distance);
        if (lane >= distance) of_warps += other;
    }
    total = __shfl_sync(kAll, of_warps, kWarps - 1);
    const unsigned before = __shfl_sync(kAll, of_warps, warp > 0 ? warp - 1 : 0);
    __syncthreads();  // before the next call writes warp_sums
    return (warp > 0 ? before : 0) + sum - mine;
}

}  // namespace

// scores [rows, stride], each row 16-byte aligned; visible [rows]; out [rows, k]. CLUSTER blocks of THREADS per row.
// With PAGE: page_table [sequences, table_stride], and sequences [rows].
#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads)
#else  // two blocks on an SM: one counts while the other adds up
extern "C" __global__ void __launch_bounds__(kThreads, 2)
#endif
select_top(const float* scores, long long stride, const int* visible, const int* page_table, long long table_stride,
           const int* sequences, long long k, int* out) {
    __shared__ Shared shared;
    const int thread = threadIdx.x, rank = block_rank();
    for (int bin = thread; bin < kBins; bin += kThreads) {
        for (int digit = 0; digit < kDigits; ++digit) shared.histograms[digit][bin] = 0;
    }
    start_next();
    wait_for_previous();
    const long long row = blockIdx.x / kBlocks;
    const int n = visible[row];
    out += row * k;
    if (n <= k) {
        const int* const pages = PAGE ? page_table + sequences[row] * table_stride : nullptr;
        for (int i = rank * kThreads + thread; i < k; i += kBlocks * kThreads) out[i] = i < n ? result(pages, i) : -1;
        return;
    }
    scores += row * stride;
    const int rounds = (n + 4 * kRoundQuads - 1) / (4 * kRoundQuads);
    const int first = 4 * kQuads * (rank * kThreads + thread);  // of this thread in round 0
    Keys keys = load_keys(scores, first, n);
    __syncthreads();

    unsigned known = 0;                          // the digits of the k-th largest key that are known, zeros below them
    unsigned known_bits = 0;                     // mask of these bits
    unsigned needed = static_cast<unsigned>(k);  // its rank among the keys that share them
    bool all_chosen = false;                     // whether all keys that share them are among the k largest
    for (int digit = 0; digit < kDigits && !all_chosen; ++digit) {
        const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0;
        const unsigned mask = digit == 2 ? 1023 : 2047;
        unsigned* const histogram = shared.histograms[digit];
        for (int round = 0; round < rounds; ++round) {
            if (rounds > 1) keys = load_keys(scores, first + 4 * kRoundQuads * round, n);
#pragma unroll
            for (int i = 0; i < 4 * kQuads; ++i) {
                const unsigned key = keys.key[i];
                if (key != 0 && (key & known_bits) == known) atomicAdd(&histogram[key >> shift & mask], 1u);
            }
        }
        sync_cluster();
        unsigned larger = 0, smaller = 0;  // of all blocks, in the two bins of this thread, from the largest bin down
        for (int block = 0; block < kBlocks; ++block) {
            const unsigned* const theirs = shared_of(&shared, block)->histograms[digit];
            larger += theirs[kBins - 1 - 2 * thread];
            smaller += theirs[kBins - 2 - 2 * thread];
        }
        unsigned total;
        const unsigned before = sum_before(larger + smaller, shared.warp_sums, total);
        if (before < needed && needed <= before + larger + smaller) {
            const bool in_larger = needed <= before + larger;
            shared.found_bin = kBins - 1 - 2 * thread - !in_larger;
            shared.found_needed = needed - before - (in_larger ? 0 : larger);
            shared.found_count = in_larger ? larger : smaller;
        }
        __syncthreads();
        known |= shared.found_bin << shift;
        known_bits |= mask << shift;
        needed = shared.found_needed;
        all_chosen = shared.found_count == needed;
        __syncthreads();
    }

    // selected are keys above `limit`, and the first `needed` keys equal to it
    const unsigned limit = all_chosen ? known - 1 : known;
    if (all_chosen) needed = 0;
    const int* const pages = PAGE ? page_table + sequences[row] * table_stride : nullptr;
    unsigned larger_before = 0, equal_before = 0;  // in earlier rounds
    for (int round = 0; round < rounds; ++round) {
        if (rounds > 1) keys = load_keys(scores, first + 4 * kRoundQuads * round, n);
        unsigned counts = 0;  // of equal keys in the upper half, of larger ones in the lower: a block has 16,384
#pragma unroll
        for (int i = 0; i < 4 * kQuads; ++i) counts += keys.key[i] > limit ? 1 : keys.key[i] == limit ? 0x10000 : 0;
        unsigned total;
        const unsigned before = sum_before(counts, shared.warp_sums, total);
        if (thread == 0) shared.counts[round % 2] = total;
        sync_cluster();
        unsigned larger = larger_before + (before & 0xffff), equal = equal_before + (before >> 16);
        for (int block = 0; block < kBlocks; ++block) {
            const unsigned theirs = shared_of(&shared, block)->counts[round % 2];
            larger_before += theirs & 0xffff;
            equal_before += theirs >> 16;
            if (block < rank) {
                larger += theirs & 0xffff;
                equal += theirs >> 16;
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * kQuads; ++i) {
            const bool is_larger = keys.key[i] > limit, is_equal = keys.key[i] == limit;
            if (is_larger || (is_equal && equal < needed)) {
                out[larger + min(equal, needed)] = result(pages, first + 4 * kRoundQuads * round + i);
            }
            larger += is_larger;
            equal += is_equal;
        }
    }
    sync_cluster();  // a block must not exit while others read its shared memory
}
