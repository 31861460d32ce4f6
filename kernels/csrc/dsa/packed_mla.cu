// Attention over selected packed rows (512 fp8, 4 scales, 64 bf16; kernels/dsa/packed_rows.py) for up to 16 heads; see
// kernels/dsa/sparse_mla.py for the formula.
//
// A thread block processes a share of the selected rows of one token, 64 rows at a time. First its 8 warps compute
// scores: each warp multiplies 32 rows with one of the query's four groups of 128 elements. Then all threads turn the
// scores into weights, and store each weight four times: multiplied by the row's scale of each group. Last, each warp
// adds 64 columns of the values. Meanwhile the next 64 rows are copied. With several shares, results are partial
// (kernels/dsa/sparse_mla_triton.py combines them).
//
// There is an instruction that converts two fp8 to float16, but none that converts to bfloat16. So queries and weights
// are float16, too: the query of a head and group is divided by a power of two, and weights are multiplied by 2^8. They
// are as precise as bfloat16 if the largest latent of a group is between 3e-5 and 57,344.
//
// Constants: ALONE, 1 if there is one share; PAGE_SIZE.

#define HALF 0
#include "hopper.cuh"
#include "warps.cuh"

namespace {

constexpr int kHeads = 16, kGroups = 4, kGroupBytes = 128;
constexpr int kValues = kGroups * kGroupBytes;
constexpr int kScalesAt = kValues, kRestAt = kScalesAt + 4 * kGroups, kRowBytes = kRestAt + 128;
constexpr int kBlockRows = 64;  // rows that are multiplied together
constexpr int kThreads = 256, kThreadsOfHead = kThreads / kHeads;
constexpr int kStages = 2;
constexpr int kSteps = kGroupBytes / 16;  // products of a group, in a warp
constexpr int kScorePitch = kBlockRows + 8, kWeightPitch = kBlockRows + 8;  // without bank conflicts
constexpr float kLowest = -1e30f;  // below every score, but finite
constexpr float kWeightFactor = 256.0f, kLargestHalf = 65504.0f;
constexpr unsigned kAll = 0xffffffffu;

struct Shared {
    unsigned char stages[kStages][kBlockRows * kRowBytes];
    float scores[kGroups][kHeads][kScorePitch];  // the part of each group
    unsigned short weights[kGroups][kHeads][kWeightPitch];
    float scales[kGroups][kBlockRows];  // times kWeightFactor
    int exists[kStages][kBlockRows];
    float shrink[kHeads];
    float2 totals[kHeads];  // reference and sum of all weights of a head, when all rows are done
    int last_row;
    unsigned long long fetched[kStages];
};
static_assert(2 * (sizeof(Shared) + 1024) <= 228 << 10, "two blocks run on a multiprocessor");

struct Pages {
    const char* start;
    long long page_bytes, slot_bytes;

    __device__ const char* row(int number) const {
        return start + number / PAGE_SIZE * page_bytes + number % PAGE_SIZE * slot_bytes;
    }
};

struct Rows {  // of a share
    const int* numbers;
    int count;

    __device__ int operator[](int i) const { return i < count ? numbers[i] : -1; }
};

// A thread has the results of heads `quad` and `quad` + 8, and of columns or rows 2 * `part` and 2 * `part` + 1.
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int part() { return lane() % 4; }

// sums [16, 8] += a [16, 16] * b [8, 16]^T
#define MULTIPLY(name, element)                                                                                   \
    __device__ __forceinline__ void name(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {    \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." element "." element ".f32 {%0, %1, %2, %3}, "                 \
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                                        \
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                       \
    }
MULTIPLY(multiply_half, "f16")
MULTIPLY(multiply, "bf16")

// Converts four fp8 to float16: the first two and the last two.
__device__ __forceinline__ uint2 expand(unsigned bytes) {
    uint2 halves;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(bytes));
    return halves;
}

__device__ __forceinline__ unsigned round_halves(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// The first 64 threads copy a row each; a missing row becomes zeros.
__device__ __forceinline__ void fetch(Shared& shared, const Pages& pages, int row, int stage) {
    const unsigned barrier = shared_address(&shared.fetched[stage]);
    unsigned char* const to = shared.stages[stage] + threadIdx.x * kRowBytes;
    shared.exists[stage][threadIdx.x] = row >= 0;
    if (row >= 0) {
        expect_bytes(barrier, kRowBytes);
        copy_bulk_async(shared_address(to), pages.row(row), kRowBytes, barrier);
    } else {
        for (int i = 0; i < kRowBytes; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
        fence_async();  // a later copy of this thread overwrites the zeros
        arrive(barrier);
    }
}

// The part of the query that a warp multiplies with rows: its group of 128 elements, and 16 of the last 64 elements.
// The columns of a product may come in any order, so a thread loads 32 adjacent elements of the group, 4 for each step.
struct Query {
    unsigned group[kSteps][4], rest[4];
    float factors[2];  // the group was divided by these, for each of the two heads

    __device__ __forceinline__ void load(const char* query, long long head_bytes, int heads) {
        const int number = warp() % kGroups;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = quad() + 8 * half;
            const bool exists = head < heads;
            const char* const from = query + (exists ? head : 0) * head_bytes;
            uint4 words[kSteps / 2] = {};
            uint2 last = {};
            if (exists) {
                const char* const own = from + (number * kGroupBytes + part() * 32) * 2;
#pragma unroll
                for (int i = 0; i < kSteps / 2; ++i) words[i] = reinterpret_cast<const uint4*>(own)[i];
                last = *reinterpret_cast<const uint2*>(from + (kValues + number * 16 + part() * 4) * 2);
            }
            rest[half] = last.x;
            rest[2 + half] = last.y;
            const float inverse = scale_down(words, factors[half]);
            const auto convert = [&](unsigned pair) {
                return round_halves(low_float(pair) * inverse, high_float(pair) * inverse);
            };
#pragma unroll
            for (int i = 0; i < kSteps / 2; ++i) {
                group[2 * i][half] = convert(words[i].x);
                group[2 * i][2 + half] = convert(words[i].y);
                group[2 * i + 1][half] = convert(words[i].z);
                group[2 * i + 1][2 + half] = convert(words[i].w);
            }
        }
    }

    // The power of two that makes the greatest element of a head and group at least 1 and less than 2; `factor` is its
    // inverse.
    static __device__ __forceinline__ float scale_down(const uint4 (&words)[kSteps / 2], float& factor) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
            const unsigned pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) most = max(most, max(fabsf(low_float(pairs[j])), fabsf(high_float(pairs[j]))));
        }
        most = max(most, __shfl_xor_sync(kAll, most, 1));
        most = max(most, __shfl_xor_sync(kAll, most, 2));
        const unsigned exponent = min(max(__float_as_uint(most) >> 23, 1u), 253u);
        factor = __uint_as_float(exponent << 23);
        return __uint_as_float((254 - exponent) << 23);
    }
};

// Computes the contribution of this warp's group to the scores of 32 rows.
__device__ __forceinline__ void score(Shared& shared, const Query& query, int stage) {
    const int group = warp() % kGroups;
    const unsigned char* const rows = shared.stages[stage];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
        const int first = warp() / kGroups * 32 + tile * 8;
        const unsigned char* const row = rows + (first + quad()) * kRowBytes;
        const uint4* const bytes = reinterpret_cast<const uint4*>(row + group * kGroupBytes + part() * 32);
        const uint4 low = bytes[0], high = bytes[1];
        const unsigned words[kSteps] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float sums[4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint2 halves = expand(words[step]);
            multiply_half(sums, query.group[step], halves.x, halves.y);
        }
        const unsigned char* const scale = rows + (first + 2 * part()) * kRowBytes + kScalesAt + 4 * group;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float own = *reinterpret_cast<const float*>(scale + i * kRowBytes);
            sums[i] *= own * query.factors[0];
            sums[2 + i] *= own * query.factors[1];
        }
        const uint2 rest = *reinterpret_cast<const uint2*>(row + kRestAt + group * 32 + part() * 8);
        multiply(sums, query.rest, rest.x, rest.y);
        float* const to = &shared.scores[group][quad()][first + 2 * part()];
        *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
        *reinterpret_cast<float2*>(to + 8 * kScorePitch) = make_float2(sums[2], sums[3]);
    }
    if (threadIdx.x < kBlockRows) {
        const float4 own = *reinterpret_cast<const float4*>(rows + threadIdx.x * kRowBytes + kScalesAt);
        shared.scales[0][threadIdx.x] = own.x * kWeightFactor;
        shared.scales[1][threadIdx.x] = own.y * kWeightFactor;
        shared.scales[2][threadIdx.x] = own.z * kWeightFactor;
        shared.scales[3][threadIdx.x] = own.w * kWeightFactor;
    }
}

// A thread's state of the softmax of its head: the greatest score so far, and the sum of its own weights.
struct Softmax {
    float most = kLowest, sum = 0.0f;

    // Turns the scores of four rows of a head into weights, and stores them multiplied by the scale of each group.
    __device__ __forceinline__ void weigh(Shared& shared, int stage, float scale) {
        const int head = threadIdx.x / kThreadsOfHead, first = threadIdx.x % kThreadsOfHead * 4;
        const int4 exists = *reinterpret_cast<const int4*>(&shared.exists[stage][first]);
        const bool real[4] = {exists.x != 0, exists.y != 0, exists.z != 0, exists.w != 0};
        float scores[4] = {};
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float4 more = *reinterpret_cast<const float4*>(&shared.scores[group][head][first]);
            scores[0] += more.x;
            scores[1] += more.y;
            scores[2] += more.z;
            scores[3] += more.w;
        }
        float now = most;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] *= scale;
            if (real[i]) now = max(now, scores[i]);
        }
#pragma unroll
        for (int distance = kThreadsOfHead / 2; distance > 0; distance /= 2)
            now = max(now, __shfl_xor_sync(kAll, now, distance));
        const float shrink = exp2_approximate(most - now);
        if (first == 0) shared.shrink[head] = shrink;
        most = now;
        sum *= shrink;
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            weights[i] = real[i] ? exp2_approximate(scores[i] - now) : 0.0f;
            sum += weights[i];
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float4 scales = *reinterpret_cast<const float4*>(&shared.scales[group][first]);
            const float own[4] = {min(weights[0] * scales.x, kLargestHalf), min(weights[1] * scales.y, kLargestHalf),
                                  min(weights[2] * scales.z, kLargestHalf), min(weights[3] * scales.w, kLargestHalf)};
            *reinterpret_cast<uint2*>(&shared.weights[group][head][first]) =
                make_uint2(round_halves(own[0], own[1]), round_halves(own[2], own[3]));
        }
    }

    __device__ __forceinline__ void finish(Shared& shared) {
#pragma unroll
        for (int distance = kThreadsOfHead / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(kAll, sum, distance);
        if (threadIdx.x % kThreadsOfHead == 0) shared.totals[threadIdx.x / kThreadsOfHead] = make_float2(most, sum);
    }
};

// A thread's part of its warp's sums of 16 heads x 64 columns: [group of 16 columns][even or odd columns][results].
typedef float Sums[4][2][4];

__device__ __forceinline__ void add(Shared& shared, Sums& sums, int stage) {
    const float shrink[2] = {shared.shrink[quad()], shared.shrink[quad() + 8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][odd][j] *= shrink[j / 2];
        }
    }
    const unsigned weights = shared_address(&shared.weights[warp() / 2][lane() % 16][lane() / 16 * 8]);
    const unsigned values =
        shared_address(shared.stages[stage]) + lane() % 16 * kRowBytes + warp() * 64 + lane() / 16 * 16;
#pragma unroll
    for (int step = 0; step < kBlockRows / 16; ++step) {
        unsigned own[4];
        load_matrices(own, weights + step * 32);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {  // 32 columns; a 16-bit element of a matrix is two fp8 of a row
            unsigned words[4];
            load_transposed(words, values + step * 16 * kRowBytes + pair * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // even columns of two rows, then odd ones
                const uint2 upper = expand(__byte_perm(words[2 * i], 0, 0x3120));
                const uint2 lower = expand(__byte_perm(words[2 * i + 1], 0, 0x3120));
                multiply_half(sums[2 * pair + i][0], own, upper.x, lower.x);
                multiply_half(sums[2 * pair + i][1], own, upper.y, lower.y);
            }
        }
    }
}

// Stores a warp's 64 columns of all heads: the result, or the partial result of a share.
__device__ __forceinline__ void store(const Shared& shared, const Sums& sums, int heads, char* out, float* partial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = quad() + 8 * half;
        if (head >= heads) continue;
        const float total = shared.totals[head].y, factor = total > 0.0f ? 1.0f / (kWeightFactor * total) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = head * kValues + warp() * 64 + i * 16 + part() * 4;
            const float* const even = sums[i][0] + 2 * half;
            const float* const odd = sums[i][1] + 2 * half;
            const float4 four = make_float4(even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor);
#if ALONE
            *reinterpret_cast<uint2*>(out + place * 2) =
                make_uint2(round_pair(four.x, four.y), round_pair(four.z, four.w));
#else
            *reinterpret_cast<float4*>(partial + place) = four;
#endif
        }
    }
}

// The number of blocks of rows up to the last one that exists.
__device__ __forceinline__ int count_blocks(Shared& shared, const Rows& rows) {
    int last = 0;  // one more than its number
    for (int i = threadIdx.x; i < rows.count; i += kThreads) {
        if (rows[i] >= 0) last = i + 1;
    }
    last = __reduce_max_sync(kAll, last);
    if (lane() == 0) atomicMax(&shared.last_row, last);
    __syncthreads();
    return (shared.last_row + kBlockRows - 1) / kBlockRows;
}

}  // namespace

// query [T, heads, 576], out [T, heads, 512]; or partial [T, shares, heads, 512] and log_sum [T, shares, heads], a
// binary logarithm. A block of kThreads for every token and share.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
packed_mla(const char* query, long long token_bytes, long long head_bytes, const char* pages, long long page_bytes,
           long long slot_bytes, const int* rows, long long rows_stride, long long num_rows, long long share_rows,
           long long shares, long long scale_bits, char* out, float* partial, float* log_sum, long long heads) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) init_barrier(shared_address(&shared.fetched[stage]), kBlockRows);
        fence_barriers();
        shared.last_row = 0;
    }
    __syncthreads();
    start_next();
    wait_for_previous();

    const long long share = blockIdx.x % shares, token = blockIdx.x / shares;
    const Pages all_pages = {pages, page_bytes, slot_bytes};
    const Rows own_rows = {rows + token * rows_stride + share * share_rows,
                           static_cast<int>(min(share_rows, num_rows - share * share_rows))};
    const bool fetches = threadIdx.x < kBlockRows;
    int next_row = -1;
    if (fetches) {
        fetch(shared, all_pages, own_rows[threadIdx.x], 0);
        next_row = own_rows[kBlockRows + threadIdx.x];
    }
    Query own_query;
    own_query.load(query + token * token_bytes, head_bytes, static_cast<int>(heads));
    const int blocks = count_blocks(shared, own_rows);
    const float scale = __int_as_float(static_cast<int>(scale_bits));
    Softmax softmax;
    Sums sums = {};
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const int stage = block % kStages;
        if (fetches && block + 1 < blocks) {
            fetch(shared, all_pages, next_row, 1 - stage);
            next_row = own_rows[(block + 2) * kBlockRows + threadIdx.x];
        }
        wait_phase(shared_address(&shared.fetched[stage]), block / kStages);
        score(shared, own_query, stage);
        __syncthreads();
        softmax.weigh(shared, stage, scale);
        __syncthreads();
        add(shared, sums, stage);
        __syncthreads();  // the stage is free
    }
    softmax.finish(shared);
    __syncthreads();
    store(shared, sums, static_cast<int>(heads), out + token * heads * kValues * 2,
          partial + blockIdx.x * heads * kValues);
    if (!ALONE && threadIdx.x < heads) {
        const float2 total = shared.totals[threadIdx.x];
        log_sum[blockIdx.x * heads + threadIdx.x] = total.x + log2f(total.y);  // minus infinity if there was no row
    }
}
