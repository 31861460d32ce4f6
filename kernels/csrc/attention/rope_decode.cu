// Rotary embedding, KV write and decode attention in one kernel, for few sequences with few keys, for Hopper: see
// kernels/attention/rope_attention.py.
//
// A cluster computes one KV head of one sequence; its thread blocks divide the keys. All keys except the newest were
// written in earlier steps, so each of the 8 key warps of a block loads its first 16 keys and values before the
// previous kernel has ended. The other warps of a block wait for the previous kernel, and then normalise and rotate the
// queries. In the last block they also normalise and rotate the newest key, and write it to its page with the value.
//
// Each key warp has its own online softmax. At the end a block adds the results of its warps, and sends each part of
// the sum to the block that stores this part.
//
// Constants: D, the size of a head; GROUP query heads of a KV head; PAGE tokens of a page; NORM, 1 if norm weights have
// the dtype of the elements, 2 if they are float32, 0 if there are none; SINKS, 1 if there are sinks; HALF, 1 for
// float16, 0 for bfloat16; WARPS and SHARED_BYTES of a block.

#include "hopper.cuh"
#include "linear/mma.cuh"
#include "warps.cuh"

namespace {

constexpr float kNothing = -1e30f;  // a score for which there is no key
constexpr int kCluster = 8, kThreads = 32 * WARPS;
constexpr int kWarps = 8, kHeadWarps = WARPS - kWarps;  // key warps, and warps that normalise and rotate heads
constexpr int kKeys = 16;                    // keys of a warp in a round
constexpr int kRoundKeys = kWarps * kKeys;
constexpr int kHeads = 8;                    // columns of a product; those from GROUP on are zero
constexpr int kRuns = D / 32;                // runs of 8 adjacent elements of a key that a thread has
constexpr int kHeadLanes = 8;                // lanes that normalise and rotate a head
constexpr int kOwn = D / kHeadLanes;         // adjacent elements of the head that a lane has
constexpr int kPitch = D + 32;               // elements between queries, so that adjacent ones are in different banks
constexpr int kSumPitch = D + 4;             // elements of a row of sums
constexpr int kUnits = GROUP * D / 4, kOwnUnits = kUnits / kCluster;  // of 4 adjacent results; those of a block
static_assert(GROUP <= kHeads && kUnits % kCluster == 0 && kOwnUnits <= kThreads, "a thread stores a unit at most");
static_assert(GROUP + 1 <= kHeadWarps * 32 / kHeadLanes, "the queries and the newest key are rotated at once");

struct Shared {
    union {
        Bits values[2][kKeys][D];       // double-buffered, in the layout of `value_place`
        float sums[kHeads][kSumPitch];  // of values, at the end
    } of_warp[kWarps];
    Bits queries[kHeads][kPitch];
    Bits newest_key[D], newest_value[D];
    float tops[kWarps + 1][kHeads], totals[kWarps][kHeads];  // the last top is of the newest key
    float4 received[kCluster][kOwnUnits];
    float2 received_softmax[kCluster][kOwnUnits];  // top and total
};

static_assert(sizeof(Shared) == SHARED_BYTES, "as the launcher computes it");

struct __align__(16) Elements {
    Bits of[kOwn];
};

// The sum over the lanes of a head.
__device__ __forceinline__ float sum_of_head(float number) {
#pragma unroll
    for (int distance = kHeadLanes / 2; distance > 0; distance /= 2) number += __shfl_xor_sync(~0u, number, distance);
    return number;
}

// Transposes the 8 x 8 matrix of a warp: lane l has line l / 4, columns 2 * (l % 4) and 2 * (l % 4) + 1.
__device__ __forceinline__ unsigned transpose(unsigned word) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
    return transposed;
}

// Combines the numbers of the lanes that have the same columns of a matrix, in different lines.
template <typename Operation>
__device__ __forceinline__ float over_lines(float number, const Operation& combine) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        number = combine(number, __shfl_xor_sync(~0u, number, distance));
    return number;
}

__device__ __forceinline__ unsigned pack(float low, float high) {
    return to_bits(low) | static_cast<unsigned>(to_bits(high)) << 16;
}

// The place of a line (8 adjacent elements) of a key's value in shared memory. It is swizzled, so that the same line of
// 8 adjacent keys is in different banks.
__device__ __forceinline__ int value_place(int key, int line) { return key * D + (line ^ key % 8) * 8; }

// The keys and values of a sequence's KV head.
struct Pages {
    const Bits *keys, *values;
    const int* pages;
    long long page_stride, token_stride;

    __device__ __forceinline__ long long place(int token) const {
        return pages[token / PAGE] * page_stride + token % PAGE * token_stride;
    }
};

// The keys of a warp in one round, in registers. A lane has runs of keys lane / 4 and 8 + lane / 4.
struct Keys {
    uint4 runs[2][kRuns];

    // Also starts the copy of the values, before the loads of keys: after them, the copy would wait for keys whose
    // registers the compiler reuses for its addresses.
    __device__ __forceinline__ void load(const Pages& pages, int first, int end, Bits (&values)[kKeys][D]) {
        long long places[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)  // keys from `end` on get no weight
            places[half] = pages.place(min(first + 8 * half + lane() / 4, end - 1));
        constexpr int kLines = D / 8, kCopies = kKeys * kLines / 32;
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
            const int key = copy * (32 / kLines) + lane() / kLines, line = lane() % kLines;
            const long long place = __shfl_sync(~0u, places[copy / (kCopies / 2)], key % 8 * 4);
            const char* const from = reinterpret_cast<const char*>(pages.values + place + line * 8);
            copy_16_async(shared_address(values[0] + value_place(key, line)), from, first + key < end);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int run = 0; run < kRuns; ++run)
                runs[half][run] =
                    *reinterpret_cast<const uint4*>(pages.keys + places[half] + run * 32 + lane() % 4 * 8);
    }
};

// The norm weights of a lane. They are converted at their use, because a conversion here would wait for the load.
struct __align__(16) NormWeights {
#if NORM == 2
    typedef float Weight;
    static __device__ __forceinline__ float value(Weight weight) { return weight; }
#else
    typedef Bits Weight;
    static __device__ __forceinline__ float value(Weight weight) { return to_float(weight); }
#endif
    Weight of[kOwn];
};

// Normalises and rotates a head; each lane has kOwn adjacent elements.
__device__ __forceinline__ Elements rotate(
    const Elements& x, const Elements& cos, const Elements& signed_sin, const NormWeights& norm, float eps
) {
    float own[kOwn], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        own[i] = to_float(x.of[i]);
        squares += own[i] * own[i];
    }
#if NORM
    const float inverse = rsqrtf(sum_of_head(squares) / D + eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const float quotient = own[i] * inverse, weight = NormWeights::value(norm.of[i]);
        own[i] = rounded((NORM == 2 ? quotient : rounded(quotient)) * weight);  // as in rms_norm.py
    }
#endif
    Elements rotated;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const float opposite = __shfl_xor_sync(~0u, own[i], kHeadLanes / 2);  // in the other half of the head
        rotated.of[i] = to_bits(rounded(own[i] * to_float(cos.of[i])) + rounded(opposite * to_float(signed_sin.of[i])));
    }
    return rotated;
}

// The online softmax of a warp, on tensor cores: scores [keys, heads] and sums [columns of values, heads]. A lane has
// heads 2 * (lane % 4) and 2 * (lane % 4) + 1, keys lane / 4 and lane / 4 + 8, and of every 16 columns those with the
// same numbers as its keys.
struct Softmax {
    float top[2] = {kNothing, kNothing}, total[2] = {};
    float sums[D / 16][4] = {};

    __device__ __forceinline__ void add(
        const Keys& keys, const uint4* query, const Bits (&values)[kKeys][D], int first, int end, float scale
    ) {
        float parts[2][4] = {}, weights[2][2];
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const uint4 q = query[run * 4], low = keys.runs[0][run], high = keys.runs[1][run];
            const unsigned former[4] = {low.x, high.x, low.y, high.y}, latter[4] = {low.z, high.z, low.w, high.w};
            multiply(parts[0], former, q.x, q.y);
            multiply(parts[1], latter, q.z, q.w);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = top[i];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float score = parts[0][2 * half + i] + parts[1][2 * half + i];
                weights[half][i] = first + 8 * half + lane() / 4 < end ? score * scale : kNothing;
                most = fmaxf(most, weights[half][i]);
            }
            most = over_lines(most, [](float a, float b) { return fmaxf(a, b); });
            const float shrink = exp2f(top[i] - most);
            top[i] = most;
            total[i] *= shrink;
#pragma unroll
            for (int half = 0; half < 2; ++half) total[i] += weights[half][i] = exp2f(weights[half][i] - most);
#pragma unroll
            for (int tile = 0; tile < D / 16; ++tile) {
                sums[tile][i] *= shrink;
                sums[tile][2 + i] *= shrink;
            }
        }
        unsigned words[2];  // weights [keys, heads], as the second operand of a product
#pragma unroll
        for (int half = 0; half < 2; ++half) words[half] = transpose(pack(weights[half][0], weights[half][1]));
#pragma unroll
        for (int tile = 0; tile < D / 16; ++tile) {
            unsigned columns[4];  // 16 columns of all keys; lane l has the address of key l % 8 of matrix l / 8
            const int key = lane() / 16 * 8 + lane() % 8, line = tile * 2 + lane() / 8 % 2;
            load_transposed(columns, shared_address(values[0] + value_place(key, line)));
            multiply(sums[tile], columns, words[0], words[1]);
        }
    }

    // Stores the sums as [heads, columns].
    __device__ __forceinline__ void store(float (*to)[kSumPitch]) const {
#pragma unroll
        for (int tile = 0; tile < D / 16; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) to[lane() % 4 * 2 + i % 2][tile * 16 + i / 2 * 8 + lane() / 4] = sums[tile][i];
    }
};

// A query of the KV head, or the newest key if this block has it; kHeadLanes lanes have one of them.
struct Head {
    int number, part;  // number GROUP, after the queries, is the newest key; `part` selects this lane's elements
    bool is_query, is_key;
    Elements rotated;

    __device__ __forceinline__ explicit Head(bool has_newest)
        : number((warp() - kWarps) * (32 / kHeadLanes) + lane() / kHeadLanes), part(lane() % kHeadLanes),
          is_query(number < GROUP), is_key(number == GROUP && has_newest) {}

    // The score of this query and the newest key.
    __device__ __forceinline__ float score(const Shared& shared) const {
        const Elements key = reinterpret_cast<const Elements*>(shared.newest_key)[part];
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) score += to_float(rotated.of[i]) * to_float(key.of[i]);
        return sum_of_head(score);
    }
};

// Attention over the keys of a warp from number `first` on; `keys` are the first of them, already loaded.
__device__ __forceinline__ void attend(
    Shared& shared, const Pages& pages, Keys& keys, int first, int end, float scale
) {
    auto& own = shared.of_warp[warp()];
    const auto query = reinterpret_cast<const uint4*>(&shared.queries[lane() / 4][lane() % 4 * 8]);
    Softmax softmax;
#pragma unroll 1
    for (int buffer = 0; first < end; first += kRoundKeys, buffer ^= 1) {
        Keys next;
        __syncwarp();  // the buffer that is filled next has been read
        if (first + kRoundKeys < end) next.load(pages, first + kRoundKeys, end, own.values[buffer ^ 1]);
        asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        softmax.add(keys, query, own.values[buffer], first, end, scale);
        keys = next;
    }
    wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float total = over_lines(softmax.total[i], [](float a, float b) { return a + b; });
        if (lane() >= 4) continue;
        shared.tops[warp()][lane() * 2 + i] = softmax.top[i];
        shared.totals[warp()][lane() * 2 + i] = total;
    }
    softmax.store(own.sums);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads) rope_decode(
    const Bits* qkv, const Bits* cos, const Bits* signed_sin, const void* q_norm, const void* k_norm, Bits* key_pages,
    Bits* value_pages, const int* pages, const int* page_starts, const int* row_starts, const int* kv_lens,
    const float* sinks, Bits* out, long long kv_heads, long long cos_stride, long long page_stride,
    long long head_stride, long long token_stride, long long window, long long eps_bits, long long scale_bits
) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");  // other blocks wait for this before they write here
    const int rank = blockIdx.x % kCluster, pair = blockIdx.x / kCluster;
    const int sequence = pair / static_cast<int>(kv_heads), kv_head = pair % static_cast<int>(kv_heads);
    // The plan was written before this step, so it is read before the previous kernel ends, and all of it at once.
    const int newest = kv_lens[sequence] - 1, first_page = page_starts[sequence], row = row_starts[sequence];
    if ((newest | first_page | row) < 0) {  // a padded row: `newest` is -1; the others are loaded at the same time
        wait_for_previous();
        asm volatile("barrier.cluster.wait.aligned;");
        return;
    }
    start_next();  // not earlier: the loads of the plan would wait behind the weights of the next kernel
    const int first_key = window > 0 ? max(newest + 1 - static_cast<int>(window), 0) : 0;
    const int share = (newest - first_key + kCluster * kKeys - 1) / (kCluster * kKeys) * kKeys;
    const int begin = min(first_key + rank * share, newest), end = min(begin + share, newest);
    const long long before_head = kv_head * head_stride;
    const Pages own_pages = {
        key_pages + before_head, value_pages + before_head, pages + first_page, page_stride, token_stride
    };
    const bool has_newest = rank == kCluster - 1;
    const float eps = __int_as_float(static_cast<int>(eps_bits)), scale = __int_as_float(static_cast<int>(scale_bits));

    if (warp() < kWarps) {
        const int first = begin + warp() * kKeys;
        Keys keys;
        if (first < end) keys.load(own_pages, first, end, shared.of_warp[warp()].values[0]);
        asm volatile("cp.async.commit_group;" ::: "memory");
        __syncthreads();
        attend(shared, own_pages, keys, first, end, scale);
    } else {
        Head head(has_newest);
        const long long place = head.is_key ? before_head + own_pages.place(newest) : 0;
        NormWeights norm;
#if NORM
        norm = static_cast<const NormWeights*>(head.is_key ? k_norm : q_norm)[head.part];
#endif
        for (int i = threadIdx.x - 32 * kWarps; i < (kHeads - GROUP) * kPitch && GROUP < kHeads; i += 32 * kHeadWarps)
            (&shared.queries[GROUP][0])[i] = 0;

        wait_for_previous();
        const Bits* const of_row = qkv + row * kv_heads * (GROUP + 2) * D;
        const auto load_head = [&](long long number) {
            return reinterpret_cast<const Elements*>(of_row + number * D)[head.part];
        };
        const Elements own_cos = reinterpret_cast<const Elements*>(cos + row * cos_stride)[head.part];
        const Elements own_sin = reinterpret_cast<const Elements*>(signed_sin + row * cos_stride)[head.part];
        const long long query = kv_head * GROUP + min(head.number, GROUP - 1);
        const Elements x = load_head(head.is_key ? kv_heads * GROUP + kv_head : query);
        Elements value;
        if (head.is_key) value = load_head(kv_heads * (GROUP + 1) + kv_head);
        head.rotated = rotate(x, own_cos, own_sin, norm, eps);
        if (head.is_query) reinterpret_cast<Elements*>(shared.queries[head.number])[head.part] = head.rotated;
        if (head.is_key) {
            reinterpret_cast<Elements*>(shared.newest_key)[head.part] = head.rotated;
            reinterpret_cast<Elements*>(shared.newest_value)[head.part] = value;
            reinterpret_cast<Elements*>(key_pages + place)[head.part] = head.rotated;
            reinterpret_cast<Elements*>(value_pages + place)[head.part] = value;
        }
        __syncthreads();
        const float score = head.score(shared) * scale;
        if (head.is_query && head.part == 0) shared.tops[kWarps][head.number] = has_newest ? score : kNothing;
    }
    __syncthreads();

    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have started
    for (int unit = threadIdx.x; unit < kUnits; unit += kThreads) {
        const int head = unit / (D / 4), column = unit % (D / 4) * 4;
        float top = kNothing, total = 0.0f, sums[4] = {};
#pragma unroll
        for (int i = 0; i <= kWarps; ++i) top = fmaxf(top, shared.tops[i][head]);
        if (has_newest) {
            total = exp2f(shared.tops[kWarps][head] - top);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = total * to_float(shared.newest_value[column + i]);
        }
#pragma unroll 4
        for (int i = 0; i < kWarps; ++i) {
            const float weight = exp2f(shared.tops[i][head] - top);
            const float4 part = *reinterpret_cast<const float4*>(&shared.of_warp[i].sums[head][column]);
            total += weight * shared.totals[i][head];
            sums[0] += weight * part.x;
            sums[1] += weight * part.y;
            sums[2] += weight * part.z;
            sums[3] += weight * part.w;
        }
        const int target = unit / kOwnUnits, place = unit % kOwnUnits;
        const unsigned to = in_block(shared_address(&shared.received[rank][place]), target);
        store_remote(to, sums[0], sums[1], sums[2], sums[3]);
        const unsigned to_softmax = in_block(shared_address(&shared.received_softmax[rank][place]), target);
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to_softmax), "f"(top), "f"(total) : "memory");
    }
    sync_cluster();

    if (threadIdx.x >= kOwnUnits) return;
    wait_for_previous();  // key warps have not waited yet
    const int unit = rank * kOwnUnits + threadIdx.x;
    const long long head = kv_head * GROUP + unit / (D / 4);
    float top = kNothing, total = 0.0f, sums[4] = {};
#pragma unroll
    for (int i = 0; i < kCluster; ++i) top = fmaxf(top, shared.received_softmax[i][threadIdx.x].x);
#if SINKS
    const float sink = sinks[head] * 1.4426950408889634f;  // log2(e)
    top = fmaxf(top, sink);
    total = exp2f(sink - top);
#endif
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
        const float2 part_softmax = shared.received_softmax[i][threadIdx.x];
        const float4 part = shared.received[i][threadIdx.x];
        const float weight = exp2f(part_softmax.x - top);
        total += weight * part_softmax.y;
        sums[0] += weight * part.x;
        sums[1] += weight * part.y;
        sums[2] += weight * part.z;
        sums[3] += weight * part.w;
    }
    Bits* const to = out + (row * kv_heads * GROUP + head) * D + unit % (D / 4) * 4;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack(sums[0] / total, sums[1] / total), pack(sums[2] / total, sums[3] / total));
}
