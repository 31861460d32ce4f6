// Selects the experts of few tokens from the router's logits (kernels/moe/router/selection.py), and sorts the tokens by
// expert into tiles (kernels/moe/router/routing.py). The grid is one cluster of CLUSTER thread blocks: they divide the
// tokens, and the first block sorts them.
//
// One warp selects the experts of a token, one maximum after another; of equal ones it takes the lowest. A lane has
// adjacent experts. To sort, a thread has one expert and a bit mask of its tokens, which gives their number and order.
// The next kernel is allowed to start only after the selection: earlier, its blocks would take room on multiprocessors
// from kernels that run at the same time.
//
// Constants: CLUSTER; EXPERTS; GROUPS of them, GROUPS_PER_TOKEN; PER_TOKEN; NORMALISED; SOFTMAX, 1 for softmax scores,
// 0 for sigmoid scores and a bias; TILE_ROWS; FLOAT, 1 if logits are float32; HALF, 1 if they are float16, 0 if they
// are bfloat16.

#include "linear/elements.cuh"
#include "warps.cuh"

namespace {

constexpr int kThreads = EXPERTS < 256 ? 256 : EXPERTS, kWarps = kThreads / 32, kMostTokens = 64;
constexpr int kOwn = EXPERTS / 32;        // experts of a lane
constexpr int kGroupLanes = 32 / GROUPS;  // lanes of a group
constexpr unsigned kAll = 0xffffffffu;
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 1024, "lanes have equally many experts, threads one at most");
static_assert(32 % GROUPS == 0 && EXPERTS >= 2 * GROUPS, "groups have whole lanes, and two experts at least");
static_assert(PER_TOKEN <= 32 && PER_TOKEN <= EXPERTS / GROUPS * GROUPS_PER_TOKEN, "a lane has a result");

#if FLOAT
typedef float Logit;
__device__ __forceinline__ float value_of(Logit logit) { return logit; }
#else
typedef Bits Logit;
__device__ __forceinline__ float value_of(Logit logit) { return to_float(logit); }
#endif

struct Shared {
    unsigned tokens[EXPERTS][kMostTokens / 32];  // masks
    int starts[EXPERTS];
    unsigned sums[kWarps];
    int used;  // tiles
    short chosen[kMostTokens * PER_TOKEN];
};

#if CLUSTER > 1
__device__ __forceinline__ Shared& of_first_block(Shared& shared) {
    Shared* first;
    asm volatile("mapa.u64 %0, %1, 0;" : "=l"(first) : "l"(&shared));
    return *first;
}

__device__ __forceinline__ void sync_blocks() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#else
__device__ __forceinline__ Shared& of_first_block(Shared& shared) { return shared; }
__device__ __forceinline__ void sync_blocks() { __syncthreads(); }
#endif

// Larger numbers have larger keys. No number has the key 0.
__device__ __forceinline__ unsigned key_of(float number) {
    const int bits = __float_as_int(number);
    return static_cast<unsigned>(bits ^ ((bits >> 31) | static_cast<int>(0x80000000u)));
}

__device__ __forceinline__ float number_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

template <typename Operation>
__device__ __forceinline__ float over_warp(float number, Operation combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        number = combine(number, __shfl_xor_sync(kAll, number, distance));
    return number;
}

// The first lane with the largest key.
__device__ __forceinline__ int best_lane(unsigned key) {
    return __ffs(__ballot_sync(kAll, key == __reduce_max_sync(kAll, key))) - 1;
}

// Sets the keys of all experts outside the best groups to 0.
__device__ __forceinline__ void keep_best_groups(unsigned (&keys)[kOwn]) {
    unsigned most = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        second = max(second, min(most, keys[i]));
        most = max(most, keys[i]);
    }
#pragma unroll
    for (int distance = 1; distance < kGroupLanes; distance *= 2) {
        const unsigned other = __shfl_xor_sync(kAll, most, distance);
        second = max(max(second, __shfl_xor_sync(kAll, second, distance)), min(most, other));
        most = max(most, other);
    }
    unsigned strength = key_of(number_of(most) + number_of(second));
    bool kept = false;
    for (int number = 0; number < GROUPS_PER_TOKEN; ++number) {
        if (best_lane(strength) / kGroupLanes != lane() / kGroupLanes) continue;
        kept = true;
        strength = 0;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) keys[i] = kept ? keys[i] : 0;
}

// Lane i < PER_TOKEN gets expert i of a token, and its weight.
__device__ __forceinline__ int select(const Logit* logits, const float* bias, float& weight) {
    float scores[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) scores[i] = value_of(logits[lane() * kOwn + i]);
#if SOFTMAX
    float most = scores[0], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kOwn; ++i) most = fmaxf(most, scores[i]);
    most = over_warp(most, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += scores[i] = __expf(scores[i] - most);
    sum = over_warp(sum, [](float a, float b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kOwn; ++i) scores[i] /= sum;
#else
#pragma unroll
    for (int i = 0; i < kOwn; ++i) scores[i] = __fdividef(1.0f, 1.0f + __expf(-scores[i]));
#endif
    unsigned keys[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) keys[i] = key_of(SOFTMAX ? scores[i] : scores[i] + bias[lane() * kOwn + i]);
    if (GROUPS > 1) keep_best_groups(keys);
    int expert = 0;
    weight = 0.0f;
    for (int choice = 0; choice < PER_TOKEN; ++choice) {
        unsigned most = 0;
        int own = 0;
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (keys[i] <= most) continue;
            most = keys[i];
            own = i;
            score = scores[i];
        }
        const int best = best_lane(most);
        const int best_expert = __shfl_sync(kAll, lane() * kOwn + own, best);
        const float best_score = __shfl_sync(kAll, score, best);
        if (lane() == choice) {
            expert = best_expert;
            weight = best_score;
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (lane() * kOwn + i == best_expert) keys[i] = 0;
    }
    if (NORMALISED) weight /= over_warp(weight, [](float a, float b) { return a + b; }) + 1e-20f;
    return expert;
}

// Inclusive sum over the threads of the block.
__device__ __forceinline__ unsigned sum_up_to(unsigned own, unsigned* sums) {
    const auto over_lanes = [](unsigned sum) {
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const unsigned other = __shfl_up_sync(kAll, sum, distance);
            if (lane() >= distance) sum += other;
        }
        return sum;
    };
    const unsigned sum = over_lanes(own);
    if (lane() == 31) sums[warp()] = sum;
    __syncthreads();
    const unsigned of_warps = over_lanes(lane() < kWarps ? sums[lane()] : 0);
    const unsigned before = __shfl_sync(kAll, of_warps, max(warp() - 1, 0));
    return warp() > 0 ? before + sum : sum;
}

}  // namespace

#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads)
#else
extern "C" __global__ void __launch_bounds__(kThreads)
#endif
select_route(
    const Logit* logits, const float* bias, float* weights, long long* experts, int* order, int* place, int* ends,
    int* tile_experts, int* tile_firsts, int* counts, long long tokens, long long first, long long count,
    long long all_tiles, long long scale_bits
) {
    __shared__ Shared shared;
    const int thread = threadIdx.x;
    for (int i = thread; i < EXPERTS * (kMostTokens / 32); i += kThreads) (&shared.tokens[0][0])[i] = 0;
    sync_blocks();
    Shared& first_block = of_first_block(shared);
    wait_for_previous();
    const float scale = __int_as_float(static_cast<int>(scale_bits));
    for (int token = warp() * CLUSTER + blockIdx.x; token < tokens; token += kWarps * CLUSTER) {
        float weight;
        const int expert = select(logits + token * EXPERTS, bias, weight), number = token * PER_TOKEN + lane();
        if (lane() >= PER_TOKEN) continue;
        weights[number] = weight * scale;
        experts[number] = expert;
        const int own = expert - static_cast<int>(first);
        const bool here = own >= 0 && own < count;
        first_block.chosen[number] = here ? own : -1;
        if (here) atomicOr(&first_block.tokens[own][token / 32], 1u << token % 32);
    }
    __syncwarp();
    start_next();
    sync_blocks();
    if (blockIdx.x > 0) return;
    unsigned size = 0;
    if (thread < count) size = __popc(shared.tokens[thread][0]) + __popc(shared.tokens[thread][1]);
    const unsigned tiles = (size + TILE_ROWS - 1) / TILE_ROWS;
    const unsigned both = sum_up_to(size | tiles << 16, shared.sums);  // tokens in the lower half, tiles in the upper
    const int end = both & 0xffff, tiles_end = both >> 16;
    if (thread < count) {
        shared.starts[thread] = end - size;
        ends[thread] = end;
        for (int i = 0; i < tiles; ++i) {
            tile_experts[tiles_end - tiles + i] = thread;
            tile_firsts[tiles_end - tiles + i] = end - size + i * TILE_ROWS;
        }
    }
    if (thread == kThreads - 1) counts[0] = shared.used = tiles_end;
    if (thread < 2) counts[1 + thread] = 0;
    __syncthreads();
    for (int tile = shared.used + thread; tile < all_tiles; tile += kThreads) tile_experts[tile] = -1;
    for (int number = thread; number < tokens * PER_TOKEN; number += kThreads) {
        const int own = shared.chosen[number], token = number / PER_TOKEN;
        if (own < 0) continue;
        const unsigned earlier = (1u << token % 32) - 1;
        const unsigned low = shared.tokens[own][0], high = shared.tokens[own][1];
        const int rank = token < 32 ? __popc(low & earlier) : __popc(low) + __popc(high & earlier);
        order[shared.starts[own] + rank] = number;
        place[number] = shared.starts[own] + rank;
    }
}
