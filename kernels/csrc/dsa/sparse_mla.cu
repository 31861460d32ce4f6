// Attention over selected rows of 512 + 64 elements, 64 heads at a time; see kernels/dsa/sparse_mla.py for the formula.
//
// A thread block processes 64 heads of one token and a share of its selected rows (split-K); see latent_attention.cuh.
// The blocks of all shares form a cluster. At the end each block adds some of the columns over all shares.
//
// Constants: SHARES (a power of two), PAGE_SIZE, HALF (see hopper.cuh).

#include "mla/latent_attention.cuh"

namespace {

constexpr int kScannedRows = 8;  // by a thread at a time
constexpr int kShares = SHARES;
constexpr int kOwnSums = 128 / kShares;  // sums of a thread that its block adds over all shares
static_assert(kOwnSums % 8 == 0, "what store() takes");

struct Rows {  // of a share
    const int* numbers;
    int count;

    __device__ int operator[](int i) const { return i < count ? numbers[i] : -1; }

    // Masks the scores of missing rows.
    __device__ __forceinline__ void mask(int block, float (&scores)[32]) const {
        const unsigned exists[2] = {__ballot_sync(kAll, (*this)[block * kBlockRows + lane()] >= 0),
                                    __ballot_sync(kAll, (*this)[block * kBlockRows + 32 + lane()] >= 0)};
        if ((exists[0] & exists[1]) == kAll) return;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int row = i / 4 * 8 + i % 2;  // + lane % 4 * 2
            if (!(exists[row / 32] >> (lane() % 4 * 2) >> row % 32 & 1)) scores[i] = -__int_as_float(0x7f800000);
        }
    }
};

__device__ __forceinline__ void sync_shares() {
#if SHARES > 1
    sync_cluster();
#else
    __syncthreads();
#endif
}

// Computes the factors of each share's sums for the two heads of a thread: the weight of the share over the total; 0
// for a token without rows.
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

// Block i of the cluster gets the sums [i * kOwnSums, (i + 1) * kOwnSums) of every thread of all blocks' adders, adds
// and stores them. `out` is the address of the block's first head.
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
        store<kOwnSums>(own, shared.stages[0] + place(share) + warp_in_group() * kOwnSums * 128,
                        out + 16 * warp_in_group() * 1024 + half * 512 + owner * kOwnSums * 4, 16);
    }
}

__device__ __forceinline__ int count_blocks(const Shared& shared) {
    return (shared.last_row + kBlockRows - 1) / kBlockRows;
}

// The scorer counts the blocks of rows up to the last existing row, and signals the adders without waiting for them.
__device__ __forceinline__ int find_last_row(Shared& shared, const Rows& rows) {
    int last = 0;  // one more than its number
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
        init_barriers(shared);
        shared.last_row = 0;
    }
    __syncthreads();
    start_next();
    wait_for_previous();

    const int share = blockIdx.x % kShares, tiles = static_cast<int>(heads) / kHeads;
    const int tile = blockIdx.x / kShares % tiles;
    const long long token = blockIdx.x / kShares / tiles;
    const Rows own_rows = {rows + token * rows_stride + share * share_rows,
                           static_cast<int>(min(share_rows, num_rows - share * share_rows))};
    if (threadIdx.x < 128) {
        take_registers<kScorerRegisters>();
        fetch_query(shared, query + token * token_bytes + tile * kHeads * head_bytes, head_bytes, kHeads);
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
        // does not wait for the number of blocks: unneeded fetches do no harm
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
